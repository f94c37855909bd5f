"""Moving blocks between storages: swapping out and in."""

from functools import cache

import torch

from kvloom.kv.storage import Storage

Move = tuple[int, int]
"""A block of the source and the block of the target that gets its content."""

CHUNK = 64
"""Blocks per copy: bounds the memory that is used on the way."""


def copy_blocks(source: Storage, target: Storage, moves: list[Move]) -> None:
    """Copy blocks; both storages have the same codec and geometry. No target block may be in ``moves`` twice."""
    devices = source.memory.device, target.memory.device
    if devices[0] != devices[1]:
        _copy_across(source, target, moves, next(device for device in devices if device.type != "cpu"))
        return
    for first in range(0, len(moves), CHUNK):
        chunk = torch.tensor(moves[first : first + CHUNK], dtype=torch.int64)
        rows = source.blocks.index_select(0, chunk[:, 0].to(devices[0]))
        target.blocks.index_copy_(0, chunk[:, 1].to(devices[0]), rows)


def _copy_across(source: Storage, target: Storage, moves: list[Move], gpu: torch.device) -> None:
    """Between the GPU and pinned memory of the host, on a stream of its own; nothing waits on the host.

    A block is one run of bytes on both sides: one copy, at the full speed of the bus, without memory on the way. What
    was launched before is done before the copies begin, and they are done before what is launched next begins.
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
