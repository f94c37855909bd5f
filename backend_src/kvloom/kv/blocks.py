"""Which blocks of a pool are free, where nothing is shared: the host's pool. Plain Python, no tensors."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Number of blocks that ``tokens`` tokens take."""
    return -(-tokens // block_size)


class BlockPool:
    """Hands out the blocks of a pool of ``total`` blocks; each has one owner, from ``take`` to ``give``."""

    def __init__(self, total: int):
        self.total = total
        # popped from the end: the most recently released block first, whose memory is warm
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of blocks nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks in tables."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """Hand out ``count`` blocks; the caller knows that so many are free."""
        assert count <= len(self._free), "more blocks were taken than are free"
        return [self._free.pop() for _ in range(count)]

    def give(self, table: list[int]) -> None:
        """Take back every block of ``table`` and empty it."""
        self._free.extend(table)
        table.clear()

    def check(self, tables: list[list[int]]) -> None:
        """Assert that every block is free or in exactly one of ``tables``."""
        owned = [block for table in tables for block in table]
        assert sorted(owned + self._free) == list(range(self.total)), "host blocks: free + swapped is not the total"
