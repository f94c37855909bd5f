"""The memory behind the block pool."""

import mmap
from pathlib import Path

import numpy as np
import torch

from kvloom.kv.codec import BlockGeometry, LayerCache, PlainCodec


class Storage:
    """One run of bytes that holds the blocks, one after the other.

    Args:
        codec: how a block lies in its bytes.
        geometry: what a block holds.
        blocks: how many.
        device: where they lie.
        pinned: for host memory that a GPU copies from and to: it can't be paged out, and is all taken at once.

    Attributes:
        memory: uint8 [bytes], all of it.
        blocks: uint8 [blocks, bytes of a block], for moving them.
        layers: what attention reads and writes, per layer.
    """

    def __init__(
        self, codec: PlainCodec, geometry: BlockGeometry, blocks: int, device: torch.device, pinned: bool = False
    ):
        block_bytes = codec.block_bytes(geometry)
        size = blocks * block_bytes
        # zeroed: a masked row of a fresh block times NaN would be NaN
        if pinned or device.type != "cpu":
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        else:
            self.memory = torch.from_numpy(_zeros(size))
        self.blocks = self.memory.view(blocks, block_bytes)
        self.layers: list[LayerCache] = codec.layers(self.memory, geometry)


def _zeros(size: int) -> np.ndarray:
    """Bytes that are zero.

    They take neither time nor memory before a page is written (torch's are written at once), and lie in huge pages
    where the system has them: attention reads a layer's part of a block here and of the next one far away, and is a
    third slower when it waits for the place of each.
    """
    if not size:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
