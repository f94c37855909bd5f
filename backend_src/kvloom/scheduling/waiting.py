"""Who waits, in the order of their turns."""

import heapq
from collections.abc import Iterator

from kvloom.request import Sequence


class Waiting:
    """Sequences by rank. Adding and taking cost O(log n), removing O(1) on average: who left is skipped in its turn."""

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
        """Let a sequence wait; its rank must not change meanwhile, and no other has it."""
        heapq.heappush(self._heap, (sequence.rank, sequence))
        self._members.add(sequence)

    def first(self) -> Sequence | None:
        """Whose turn is next."""
        while self._heap and self._heap[0][1] not in self._members:
            heapq.heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def take(self) -> Sequence:
        """Take out whose turn is next; somebody waits."""
        sequence = self.first()
        assert sequence is not None
        heapq.heappop(self._heap)
        self._members.remove(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out for good."""
        self._members.remove(sequence)
        # whose turn is far off would be kept in memory until then
        if len(self._heap) > 2 * len(self._members) + 64:
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapq.heapify(self._heap)
