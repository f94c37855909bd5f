"""The host's block pool, which tracks free blocks. Its blocks are never shared. Plain Python, no tensors."""


def blocks_for(tokens: int, block_size: int) -> int:
    """Number of blocks that ``tokens`` tokens need."""
    return -(-tokens // block_size)


class BlockPool:
    """Allocates the blocks of a pool of ``total`` blocks. A block has one owner between ``take`` and ``give``."""

    def __init__(self, total: int):
        self.total = total
        # popped from the end: the memory of the most recently released block is likely in a CPU cache
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of allocated blocks."""
        return self.total - len(self._free)

    def take(self, count: int) -> list[int]:
        """Allocate ``count`` blocks. The caller must know that this many are free."""
        assert count <= len(self._free), "more blocks were taken than are free"
        return [self._free.pop() for _ in range(count)]

    def give(self, table: list[int]) -> None:
        """Free every block of ``table`` and empty the table."""
        self._free.extend(table)
        table.clear()

    def check(self, tables: list[list[int]]) -> None:
        """Assert that every block is free or in exactly one of ``tables``."""
        owned = [block for table in tables for block in table]
        assert sorted(owned + self._free) == list(range(self.total)), "host blocks: free + swapped is not the total"
