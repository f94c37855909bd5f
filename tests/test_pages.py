"""Pages of the pool that the system gives before blocks need them."""

import ctypes
import logging
import mmap
import time

import pytest
import torch

from block_cache import cache_of, put
from kvloom.kv import pages
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.pages import PagesAhead
from kvloom.kv.storage import Storage

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
    deadline = time.monotonic() + 20
    while resident(memory) < size and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.05)
    return resident(memory) == size


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
    PagesAhead(pool, BLOCK_BYTES)
    assert settles_at(pool[: 32 * MIB], 32 * MIB)
    assert torch.equal(pool, before)


def test_a_system_that_cannot_leaves_pages_to_their_first_use(pool, monkeypatch, caplog):
    monkeypatch.setattr(pages, "MADV_POPULATE_WRITE", 12345)
    with caplog.at_level(logging.INFO, "kvloom"):
        ahead = PagesAhead(pool, BLOCK_BYTES)
        deadline = time.monotonic() + 20
        while not caplog.records and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "as they are used: Invalid argument" in caplog.text
    ahead.used(BLOCKS - 1)
    assert resident(pool) == 0
    pool[-1] = 1
    assert 0 < resident(pool) <= 4 * MIB


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
