"""Moving blocks between storages: swapping out and in."""

import torch

from kvloom.kv.storage import Storage

Move = tuple[int, int]
"""A block of the source and the block of the target that gets its content."""

CHUNK = 64
"""Blocks per copy: bounds the memory that is used on the way."""


def copy_blocks(source: Storage, target: Storage, moves: list[Move]) -> None:
    """Copy blocks; both storages have the same codec and geometry. No target block may be in ``moves`` twice."""
    for first in range(0, len(moves), CHUNK):
        chunk = torch.tensor(moves[first : first + CHUNK], dtype=torch.int64)
        rows = source.blocks.index_select(0, chunk[:, 0].to(source.blocks.device))
        target.blocks.index_copy_(0, chunk[:, 1].to(target.blocks.device), rows.to(target.blocks.device))
