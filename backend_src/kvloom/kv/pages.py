"""The system's memory for the block pool, taken before its blocks are.

A page is given when it is first touched, and in a step that is time nobody has: 0.2 ms for each 2 MiB, and fifty times
that on a virtual machine whose host has to find the memory.
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
"""Bytes that are kept ready beyond what blocks have used; more are asked for when half of them are left."""

CHUNK = 4 * 2**20
"""Bytes that are asked for at once: while they come, no other thread can map memory."""

MADV_POPULATE_WRITE = 23
"""Linux 5.14; Python has no name for it."""


class PagesAhead:
    """Has the system give a pool's pages, in order, in a thread that lives as long as that takes.

    Blocks may be used meanwhile, and may be used before their pages are there: then the step that does waits for them.
    The thread ends, at most a chunk later, when nobody has this object any more and when the program ends.

    Args:
        memory: the pool, uint8, of whole pages from its beginning.
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
        """Blocks up to and with this one are in use; of those who call this, only one does at a time."""
        used, size = (block + 1) * self._block_bytes, self._memory.nbytes
        self._wanted = min(used + AHEAD, size)
        running = self._thread is not None and self._thread.is_alive()
        if self._ready < min(used + AHEAD // 2, size) and not running:
            # no daemon: one that is the last to have the memory aborts the program when Python ends while it frees it
            self._thread = threading.Thread(target=_take, args=(weakref.ref(self),), name="kvloom-pages", daemon=False)
            self._thread.start()

    def _take_chunk(self) -> bool:
        """Whether to go on."""
        if self._ready >= self._wanted:
            return False
        size = min(CHUNK, self._memory.nbytes - self._ready)
        if not self._madvise(self._memory.data_ptr() + self._ready, size, MADV_POPULATE_WRITE):
            self._ready += size
            return True
        code = ctypes.get_errno()
        if code in (errno.EINTR, errno.EAGAIN):
            return True
        log.info("the pool's pages come as they are used: %s", os.strerror(code))
        self._ready = self._memory.nbytes
        return False


def _take(pages: "weakref.ref[PagesAhead]") -> None:
    while threading.main_thread().is_alive():
        here = pages()
        if here is None or not here._take_chunk():
            return
        del here
