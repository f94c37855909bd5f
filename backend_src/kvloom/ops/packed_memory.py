"""Memory for packed weights, in huge pages.

A product of a few rows streams through its weight; in pages of 4 KiB that takes half as long again on one core.
"""

import logging
import mmap
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

SLAB = 2**30
"""Bytes of address space that are reserved at once; what is not written to takes no memory."""

HUGE_PAGE = 2 * 2**20

ALIGNMENT = 64
"""Of each weight: a cache line, and the widest vector."""

Allocate = Callable[[int], torch.Tensor]
"""Makes an uninitialized uint8 tensor of so many bytes."""


def small_pages(size: int) -> torch.Tensor:
    """For weights that are few."""
    return torch.empty(size, dtype=torch.uint8)


class HugePages:
    """Lays weights one behind the other in slabs, which live as long as a weight in them."""

    def __init__(self) -> None:
        self._slab = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def __call__(self, size: int) -> torch.Tensor:
        """See ``Allocate``."""
        if self._used + size > len(self._slab):
            self._slab, self._used = _slab(max(SLAB, -(-size // HUGE_PAGE) * HUGE_PAGE)), 0
        start = self._used
        self._used += -(-size // ALIGNMENT) * ALIGNMENT
        return self._slab[start : start + size]


def _slab(size: int) -> torch.Tensor:
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    memory = mmap.mmap(-1, size + HUGE_PAGE, flags=flags)
    try:
        memory.madvise(mmap.MADV_HUGEPAGE)
    except OSError as error:
        log.info("no huge pages for the weights (%s): small batches are slower", error.strerror)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    return slab[-slab.data_ptr() % HUGE_PAGE :][:size]
