"""Populates the block pool's memory pages before blocks are used.

The system provides a page when it is first touched. In a step that costs too much time: 0.2 ms for each 2 MiB, and
fifty times that on a virtual machine if its host has to find the memory.
"""

import ctypes
import errno
import logging
import os
import threading
import weakref

import torch

log = logging.getLogger(__name__)

AHEAD = 2**30
"""Bytes to keep populated beyond the used blocks. When only half of them are left, more are populated."""

CHUNK = 4 * 2**20
"""Bytes to populate per call. During a call no other thread can map memory."""

MADV_POPULATE_WRITE = 23
"""Needs Linux 5.14. Python has no name for it."""


class PagesAhead:
    """Populates a pool's pages in order, in a thread that runs as long as there is work.

    Blocks may be used in the meantime. If a step uses a block before its pages are populated, the step waits for them.
    When this object is deleted or the program ends, the thread ends after at most one chunk.

    Args:
        memory: the pool, uint8. It begins at a page boundary.
        block_bytes: size of a block.
    """

    def __init__(self, memory: torch.Tensor, block_bytes: int):
        self._memory = memory
        self._block_bytes = block_bytes
        self._ready = self._wanted = 0
        self._thread: threading.Thread | None = None
        self._madvise = ctypes.CDLL(None, use_errno=True).madvise
        self._madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        self.used(-1)

    def used(self, block: int) -> None:
        """Note that blocks up to and including this one are in use. Only one thread may call this at a time."""
        used, size = (block + 1) * self._block_bytes, self._memory.nbytes
        self._wanted = min(used + AHEAD, size)
        running = self._thread is not None and self._thread.is_alive()
        if self._ready < min(used + AHEAD // 2, size) and not running:
            # Not a daemon thread: if it held the last reference, freeing the memory at Python's exit would abort
            self._thread = threading.Thread(target=_take, args=(weakref.ref(self),), name="kvloom-pages", daemon=False)
            self._thread.start()

    def _take_chunk(self) -> bool:
        """Populate one chunk. Returns whether to continue."""
        if self._ready >= self._wanted:
            return False
        size = min(CHUNK, self._memory.nbytes - self._ready)
        if not self._madvise(self._memory.data_ptr() + self._ready, size, MADV_POPULATE_WRITE):
            self._ready += size
            return True
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            return True
        log.info(
            "could not populate the block pool's pages, so steps wait for them on first use: %s", os.strerror(code)
        )
        self._ready = self._memory.nbytes
        return False


def _take(pages: "weakref.ref[PagesAhead]") -> None:
    while threading.main_thread().is_alive():
        here = pages()
        if here is None or not here._take_chunk():
            return
        del here
