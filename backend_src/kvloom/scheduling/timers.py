"""Timers of sequences: deadlines and queue timeouts."""

import heapq
import itertools
from typing import Literal

from kvloom.request import Sequence

Kind = Literal["deadline", "queue"]


class Timers:
    """A heap of timers. Each costs O(log n)."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Kind, Sequence]] = []
        self._numbers = itertools.count()
        self._live: set[Sequence] = set()

    def add(self, when: float, kind: Kind, sequence: Sequence) -> None:
        """Set a timer of a sequence to ``when`` (``time.monotonic()``)."""
        heapq.heappush(self._heap, (when, next(self._numbers), kind, sequence))
        self._live.add(sequence)

    def forget(self, sequence: Sequence) -> None:
        """Drop a sequence's timers. Otherwise they keep the sequence in memory until they are due."""
        self._live.discard(sequence)
        # A sequence has at most two timers
        if len(self._heap) > 2 * len(self._live) + 64:
            self._heap = [entry for entry in self._heap if entry[3] in self._live]
            heapq.heapify(self._heap)

    @property
    def next(self) -> float:
        """When the next timer is due (``time.monotonic()``); infinite if there is none. A dropped timer may count."""
        return self._heap[0][0] if self._heap else float("inf")

    def due(self, now: float) -> list[tuple[Kind, Sequence]]:
        """Remove and return the timers that are due."""
        found: list[tuple[Kind, Sequence]] = []
        while self._heap and self._heap[0][0] <= now:
            _, _, kind, sequence = heapq.heappop(self._heap)
            if sequence in self._live:
                found.append((kind, sequence))
        return found
