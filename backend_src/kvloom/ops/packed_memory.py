"""Allocates memory for packed weights in huge pages.

A product of a few rows streams through its weight. With 4 KiB pages that takes half as long again on one core.
"""

import logging
import mmap
from collections.abc import Callable

import torch

log = logging.getLogger(__name__)

SLAB = 2**30
"""Bytes of address space to reserve at once. Pages that are not written take no memory."""

HUGE_PAGE = 2 * 2**20

ALIGNMENT = 64
"""Alignment of each weight in bytes: a cache line and the widest vector."""

Allocate = Callable[[int], torch.Tensor]
"""Makes an uninitialized uint8 tensor of the given number of bytes."""


def small_pages(size: int) -> torch.Tensor:
    """Allocate in ordinary pages, for a few weights."""
    return torch.empty(size, dtype=torch.uint8)


class HugePages:
    """Allocates weights one after the other in slabs. A slab lives as long as any weight in it."""

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
        log.info("could not get huge pages for the weights (%s): small batches are slower", error.strerror)
    slab = torch.frombuffer(memory, dtype=torch.uint8)
    return slab[-slab.data_ptr() % HUGE_PAGE :][:size]
