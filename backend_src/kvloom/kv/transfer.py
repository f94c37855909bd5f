"""Copies blocks between storages, to swap them out and in."""

from functools import cache

import torch

from kvloom.kv.storage import Storage

Move = tuple[int, int]
"""A block of the source and the block of the target to copy it to."""

CHUNK = 64
"""Blocks per copy. It limits temporary memory."""


def copy_blocks(source: Storage, target: Storage, moves: list[Move]) -> None:
    """Copy blocks between storages of the same codec and geometry. A target block may appear only once in ``moves``."""
    devices = source.memory.device, target.memory.device
    if devices[0] != devices[1]:
        _copy_across(source, target, moves, next(device for device in devices if device.type != "cpu"))
        return
    for first in range(0, len(moves), CHUNK):
        chunk = torch.tensor(moves[first : first + CHUNK], dtype=torch.int64)
        rows = source.blocks.index_select(0, chunk[:, 0].to(devices[0]))
        target.blocks.index_copy_(0, chunk[:, 1].to(devices[0]), rows)


def _copy_across(source: Storage, target: Storage, moves: list[Move], gpu: torch.device) -> None:
    """Copy blocks between the GPU and pinned host memory on a separate stream. The host does not wait.

    A block is contiguous on both sides, so it is one copy at the bus's full speed, without temporary memory. The copies
    begin after all work launched before them, and work launched after them begins when they are done.
    """
    stream, main = _stream(gpu), torch.cuda.current_stream(gpu)
    stream.wait_stream(main)
    with torch.cuda.stream(stream):
        for old, new in moves:
            target.blocks[new].copy_(source.blocks[old], non_blocking=True)
    main.wait_stream(stream)


@cache
def _stream(gpu: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(gpu)
