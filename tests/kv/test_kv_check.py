"""The check of the block cache sees what is broken."""

import pytest

from kvloom.kv.blocks import BlockPool
from kvloom.kv.cache import BlockCache
from kvloom.kv.prefix_index import Key
from support.block_cache import A, B, C, D, cache_of, compute, put, put_retained, take


def _used(cache: BlockCache) -> int:
    return next(block for block, tables in enumerate(cache._tables) if tables)


def _cached_head(cache: BlockCache) -> int:
    return cache.match("", [*C, 9])[0]


def _forget_the_head(cache: BlockCache) -> None:
    """What continues it stays hashed."""
    head = _cached_head(cache)
    cache._index.remove(head)
    del cache._evictable[head]
    cache._free.append(head)


BREAKERS = {
    "lost": lambda cache: cache._free.pop(),
    "twice free": lambda cache: cache._free.append(cache._free[0]),
    "free instead of another": lambda cache: cache._free.__setitem__(0, cache._free[1]),
    "free and used": lambda cache: cache._free.__setitem__(0, _used(cache)),
    "free and cached": lambda cache: cache._free.__setitem__(0, next(iter(cache._evictable))),
    "cached and kept": lambda cache: cache._evictable.__setitem__(next(iter(cache._kept)), None),
    "leaked": lambda cache: cache._tables.__setitem__(_used(cache), 2),
    "counted too low": lambda cache: cache._tables.__setitem__(_used(cache), 0),
    "cached but not hashed": lambda cache: cache._index.remove(next(iter(cache._evictable))),
    "can't be reached": _forget_the_head,
    "finds another": lambda cache: cache._index._blocks.update(dict.fromkeys(cache._index._blocks, 0)),
    "finds what is not hashed": lambda cache: cache._index._blocks.update({Key("", (7, 7, 7, 7)): cache._free[0]}),
    "kept without being retained": lambda cache: cache._retained.pop(next(iter(cache._kept))),
}


@pytest.mark.parametrize("name", BREAKERS)
def test_the_check_sees_a_broken_state(name):
    cache = cache_of(12, retain_limit=4)
    running = compute(cache, A + B + D[:1])
    put(cache, C + D)
    put_retained(cache, D + A, until=10.0)
    cache.check([running.blocks])
    BREAKERS[name](cache)
    with pytest.raises(AssertionError):
        cache.check([running.blocks])


def test_the_check_sees_a_table_that_was_forgotten():
    cache = cache_of()
    running = compute(cache, A + B)
    with pytest.raises(AssertionError, match="is in 0 block tables but counts 1"):
        cache.check([])
    with pytest.raises(AssertionError, match="is in 2 block tables but counts 1"):
        cache.check([running.blocks, running.blocks[:1]])


def test_releasing_twice_is_caught():
    cache = cache_of(4)
    table = take(cache, 2)
    stale = list(table)
    cache.release(table)
    assert table == []
    with pytest.raises(AssertionError):
        cache.release(stale)


# The host's pool


def test_the_hosts_pool_counts():
    pool = BlockPool(4)
    first, second = pool.take(2), pool.take(1)
    assert (pool.free, pool.used) == (1, 3)
    pool.check([first, second])
    with pytest.raises(AssertionError):
        pool.take(2)
    with pytest.raises(AssertionError, match="free \\+ swapped"):
        pool.check([first])
    with pytest.raises(AssertionError, match="free \\+ swapped"):
        pool.check([first, second, second])
    pool.give(first)
    assert first == []
    assert pool.free == 3
