"""Which blocks of the pool are free. Plain Python, no tensors."""


class BlockPool:
    """Hands out the blocks of a pool of ``total`` blocks of ``block_size`` tokens each.

    A block is owned by one block table from ``extend`` to ``release``; nothing else gives blocks away or takes them
    back.
    """

    def __init__(self, total: int, block_size: int):
        self.total = total
        self.block_size = block_size
        # popped from the end: the most recently released block first, whose memory is warm
        self._free = list(range(total - 1, -1, -1))

    @property
    def free(self) -> int:
        """Number of blocks nobody owns."""
        return len(self._free)

    @property
    def used(self) -> int:
        """Number of blocks in block tables."""
        return self.total - len(self._free)

    def blocks_for(self, tokens: int) -> int:
        """Number of blocks that ``tokens`` tokens take."""
        return -(-tokens // self.block_size)

    def extend(self, table: list[int], tokens: int) -> bool:
        """Append blocks to ``table`` until it holds ``tokens`` tokens.

        Returns:
            False, with nothing changed, when too few blocks are free.
        """
        missing = self.blocks_for(tokens) - len(table)
        if missing > len(self._free):
            return False
        table.extend(self._free.pop() for _ in range(missing))
        return True

    def release(self, table: list[int]) -> None:
        """Take back every block of ``table`` and empty it."""
        self._free.extend(table)
        table.clear()
        assert len(self._free) <= self.total, "a block was released twice"
