"""The memory of a block pool."""

import mmap
from pathlib import Path

import numpy as np
import torch

from kvloom.kv.codec import BlockGeometry, LayerCache, PlainCodec


class Storage:
    """One contiguous buffer that holds all blocks in order.

    Args:
        codec: the layout of a block.
        geometry: the dimensions of a block.
        blocks: the number of blocks.
        device: where the memory is.
        pinned: use pinned host memory, for copies from and to a GPU. It can't be paged out and is allocated at once.

    Attributes:
        memory: uint8 [bytes], the whole buffer.
        blocks: uint8 [blocks, bytes of a block], for copying blocks.
        layers: each layer's keys and values, which attention reads and writes.
    """

    def __init__(
        self, codec: PlainCodec, geometry: BlockGeometry, blocks: int, device: torch.device, pinned: bool = False
    ):
        block_bytes = codec.block_bytes(geometry)
        size = blocks * block_bytes
        # Zeroed because attention multiplies masked rows by 0, and 0 times NaN is NaN
        if pinned or device.type != "cpu":
            self.memory = torch.zeros(size, dtype=torch.uint8, device=device, pin_memory=pinned)
        else:
            self.memory = torch.from_numpy(_zeros(size))
        self.blocks = self.memory.view(blocks, block_bytes)
        self.layers: list[LayerCache] = codec.layers(self.memory, geometry)


def _zeros(size: int) -> np.ndarray:
    """Allocate zeroed memory, in huge pages if the system has them.

    Unlike torch's zeroed memory, it takes no time and no memory before a page is written. Attention reads a layer's
    part of each block, and these parts are far apart. Without huge pages TLB misses make it a third slower.
    """
    if not size:
        return np.empty(0, dtype=np.uint8)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE") and Path("/sys/kernel/mm/transparent_hugepage").exists():
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, dtype=np.uint8)
