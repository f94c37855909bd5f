"""Pages of the pool that the system gives before blocks need them."""

import ctypes
import logging
import mmap
import threading
import time

import pytest
import torch

from kvloom.kv import pages
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.pages import PagesAhead
from kvloom.kv.storage import Storage
from kvloom.ops.packed_memory import HUGE_PAGE
from support.block_cache import cache_of, put

MIB = 2**20
BLOCKS = 96
BLOCK_BYTES = MIB


@pytest.fixture
def pool(monkeypatch) -> torch.Tensor:
    """96 blocks of 1 MiB that nothing has touched, of which 32 MiB are to be ready."""
    monkeypatch.setattr(pages, "AHEAD", 32 * MIB)
    geometry = BlockGeometry(n_layers=4, n_kv_heads=8, head_dim=128, block_size=64)
    return Storage(PlainCodec(torch.bfloat16), geometry, BLOCKS, torch.device("cpu")).memory


def resident(memory: torch.Tensor) -> int:
    """Bytes that the system has given, by mincore(2)."""
    vector = (ctypes.c_ubyte * (memory.nbytes // mmap.PAGESIZE))()
    assert not ctypes.CDLL(None).mincore(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(memory.nbytes), vector)
    return sum(page & 1 for page in vector) * mmap.PAGESIZE


def settles_at(memory: torch.Tensor, size: int) -> bool:
    """Where the pool does not begin with a huge page, the last one that is given reaches beyond the size."""
    deadline = time.monotonic() + 20
    while resident(memory) < size and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return size <= resident(memory) < size + HUGE_PAGE


def test_pages_come_ahead_of_blocks_and_no_further(pool):
    assert pool.nbytes == BLOCKS * BLOCK_BYTES
    assert resident(pool) == 0
    ahead = PagesAhead(pool, BLOCK_BYTES)
    assert settles_at(pool, 32 * MIB)
    ahead.used(7)  # more than half of what was ready is left
    assert settles_at(pool, 32 * MIB)
    ahead.used(23)
    assert settles_at(pool, 56 * MIB)
    ahead.used(BLOCKS - 1)
    assert settles_at(pool, BLOCKS * MIB)


def test_what_blocks_hold_stays(pool):
    pool[:: 3 * MIB] = 7
    before = pool.clone()
    ahead = PagesAhead(pool, BLOCK_BYTES)
    ahead._thread.join(20)
    assert ahead._ready == 32 * MIB
    assert torch.equal(pool, before)


def test_a_system_that_cannot_leaves_pages_to_their_first_use(pool, monkeypatch, caplog):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 12345)
    with caplog.at_level(logging.INFO, "kvloom"):
        ahead = PagesAhead(pool, BLOCK_BYTES)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "on first use: Invalid argument" in caplog.text
    ahead.used(BLOCKS - 1)
    assert resident(pool) == 0
    pool[-1] = 1
    assert 0 < resident(pool) <= 4 * MIB


@pytest.fixture
def asked(monkeypatch) -> list[int]:
    """The beginnings of the chunks that were asked for, of a system that takes its time; they are of one page."""
    chunks: list[int] = []

    def madvise(address: int, size: int, advice: int) -> int:
        chunks.append(address)
        time.sleep(0.01)
        return 0

    class Library:
        def __init__(self, name: None, use_errno: bool):
            self.madvise = madvise

    monkeypatch.setattr(ctypes, "CDLL", Library)
    monkeypatch.setattr(pages, "CHUNK", mmap.PAGESIZE)
    return chunks


def test_a_pool_that_nobody_has_any_more_gets_no_pages(pool, asked):
    ahead = PagesAhead(pool, BLOCK_BYTES)
    thread = ahead._thread
    while not asked:
        time.sleep(0.001)
    del ahead
    thread.join(5)
    assert not thread.is_alive()
    assert len(asked) < 32 * MIB / mmap.PAGESIZE / 10


def test_the_end_of_the_program_does_not_wait_for_pages(pool, asked, monkeypatch):
    ahead = PagesAhead(pool, BLOCK_BYTES)
    # Python waits for the thread before it ends, so that it is not killed while it frees the pool
    assert not ahead._thread.daemon
    monkeypatch.setattr(threading.main_thread(), "is_alive", lambda: False)
    ahead._thread.join(5)
    assert not ahead._thread.is_alive()


def test_a_cache_tells_of_a_block_once_and_in_order():
    told: list[int] = []
    cache = cache_of(6, first_use=told.append)
    assert put(cache, [1] * 9) == told == [0, 1, 2]
    cache.flush()
    put(cache, [2] * 9)
    assert told == [0, 1, 2]
    put(cache, [3] * 9)
    assert told == [0, 1, 2, 3, 4]
    put(cache, [4] * 24)
    put(cache, [5] * 24)
    assert told == [0, 1, 2, 3, 4, 5]
