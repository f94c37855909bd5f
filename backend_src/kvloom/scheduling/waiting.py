"""The queue of waiting sequences."""

import heapq
from collections.abc import Iterator

from kvloom.request import Sequence


class Waiting:
    """A priority queue by rank. Adding and taking cost O(log n). Removing costs O(1) on average, as it is lazy."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __contains__(self, sequence: Sequence) -> bool:
        return sequence in self._members

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._members)

    def add(self, sequence: Sequence) -> None:
        """Add a sequence. Its rank must be unique and must not change while it waits."""
        heapq.heappush(self._heap, (sequence.rank, sequence))
        self._members.add(sequence)

    def first(self) -> Sequence | None:
        """The first sequence in rank; None if no sequence waits."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self) -> Sequence:
        """Remove and return the first sequence in rank. The queue must not be empty."""
        sequence = self.first()
        assert sequence is not None
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Remove a sequence."""
        self._members.remove(sequence)
        # The heap would keep removed sequences in memory until they come first
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
