"""The block cache: what is found, what is reclaimed first, what is kept, and that its check sees what is broken."""

import math
import statistics
import time

import pytest

from block_rig import BLOCK
from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import KEY_TYPES, BlockCache
from kvloom.request import Request, SamplingParams, Sequence

A, B, C, D = ([letter] * BLOCK for letter in range(4))


def cache_of(blocks: int = 10, **settings: object) -> BlockCache:
    return BlockCache(blocks, BLOCK, **settings)


def compute(cache: BlockCache, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose known tokens are all computed, from what was found and for the rest by itself."""
    request = Request(id="", prompt_ids=tuple(tokens), params=SamplingParams(), arrival=0.0, cache_salt=salt)
    sequence = Sequence(request)
    found = cache.match(salt, tokens)
    assert cache.open(sequence.blocks, found, len(tokens))
    sequence.listed = len(found)
    cache.list_computed(sequence, len(tokens))
    sequence.computed = len(tokens)
    return sequence


def put(cache: BlockCache, tokens: list[int], salt: str = "") -> list[int]:
    """Compute tokens and let go of them; returns the blocks they were in."""
    sequence = compute(cache, tokens, salt)
    return let_go(cache, sequence)


def let_go(cache: BlockCache, sequence: Sequence) -> list[int]:
    blocks = list(sequence.blocks)
    cache.release(sequence.blocks)
    return blocks


def put_retained(cache: BlockCache, tokens: list[int], until: float) -> list[int]:
    sequence = compute(cache, tokens)
    cache.retain(sequence.blocks[: sequence.listed], until)
    return let_go(cache, sequence)


def hits(cache: BlockCache, tokens: list[int], salt: str = "") -> int:
    """How many blocks of ``tokens`` are found, were one more token to follow."""
    return len(cache.match(salt, [*tokens, 99]))


def take(cache: BlockCache, count: int) -> list[int]:
    table: list[int] = []
    assert cache.extend(table, count * BLOCK)
    return table


# Finding


def test_full_blocks_are_found_the_last_token_is_not():
    cache = cache_of()
    blocks = put(cache, A + B + C[:2])
    assert cache.match("", [*A, *B, 9]) == blocks[:2]
    assert cache.match("", A + B) == blocks[:1]
    assert cache.match("", A + C) == blocks[:1]
    assert cache.match("", A) == cache.match("", A[:3]) == cache.match("", []) == []
    assert cache.match("", B + A) == []
    assert hits(cache, A + B + C) == 2


def test_the_same_block_after_two_beginnings_is_two_blocks():
    cache = cache_of()
    first, second = put(cache, A + C), put(cache, B + C)
    assert first[1] != second[1]
    assert cache.match("", [*A, *C, 9]) == first
    assert cache.match("", [*B, *C, 9]) == second
    assert hits(cache, C) == 0


def test_namespaces_share_nothing():
    cache = cache_of()
    blocks = {salt: put(cache, A + B, salt) for salt in ("", "x", "0")}
    assert len({block for table in blocks.values() for block in table}) == 6
    for salt, table in blocks.items():
        assert cache.match(salt, [*A, *B, 9]) == table
    assert hits(cache, A, "y") == 0


@pytest.mark.parametrize("block_hash", KEY_TYPES)
def test_a_collision_serves_nobody_elses_tokens(block_hash):
    cache = cache_of(40, block_hash=block_hash)
    texts = [x + y + z for x in (A, B) for y in (A, C, D) for z in (A, B, D)]
    blocks = {tuple(text): put(cache, text) for text in texts}
    # 2 first blocks, 6 second ones, 18 third ones
    assert cache.cached == len({block for table in blocks.values() for block in table}) == 2 + 6 + 18
    for text, table in blocks.items():
        assert cache.match("", [*text, 9]) == table
    for first in (C, D):
        assert hits(cache, first + A + A) == 0
    assert hits(cache, A + B + A) == 1


def test_weak_hashes_collide():
    keys = [KEY_TYPES["constant"](number, (number,)) for number in range(20)]
    assert len(set(map(hash, keys))) == 1
    assert len(set(keys)) == 20
    assert len({hash(KEY_TYPES["mod7"](number, (number,))) for number in range(100)}) <= 13


def test_blocks_in_use_are_shared():
    cache = cache_of(3)
    first, second = (
        compute(cache, A + B + C[:1]),
        Sequence(Request(id="", prompt_ids=tuple(A + B), params=SamplingParams(), arrival=0.0)),
    )
    found = cache.match("", [*A, *B, 9])
    assert cache.open(second.blocks, found, 2 * BLOCK)
    assert (cache.free, cache.used, cache.cached) == (0, 3, 0)
    cache.release(first.blocks)
    assert (cache.free, cache.used, cache.cached) == (1, 2, 0)
    cache.release(second.blocks)
    assert (cache.free, cache.used, cache.cached) == (1, 0, 2)


def test_what_two_computed_is_one_block_as_soon_as_one_follows():
    cache = cache_of()
    first, second = (
        Sequence(Request(id="", prompt_ids=tuple(A + B + C[:1]), params=SamplingParams(), arrival=0.0)) for _ in "ab"
    )
    for sequence in (first, second):
        assert cache.open(sequence.blocks, [], len(sequence.tokens))
    for sequence in (first, second):
        cache.list_computed(sequence, 2 * BLOCK)
    assert (first.listed, second.listed) == (2, 0)
    assert cache.follow(second) == 2 * BLOCK
    assert second.blocks[:2] == first.blocks[:2]
    assert (second.listed, second.computed, cache.used) == (2, 2 * BLOCK, 4)
    assert cache.follow(second) == 0
    cache.check([first.blocks, second.blocks])


def test_nothing_is_shared_when_sharing_is_off():
    cache = cache_of(share=False)
    blocks = put(cache, A + B)
    assert hits(cache, A + B) == 0
    assert cache.cached == 0
    sequence = compute(cache, A + B + C)
    assert cache.follow(sequence) == 0
    cache.retain(sequence.blocks, math.inf)
    assert (sequence.listed, cache.retained) == (0, 0)
    cache.release(sequence.blocks)
    assert cache.free == cache.total
    assert blocks


# Reclaiming


def test_the_tail_goes_before_the_head_one_by_one():
    cache = cache_of(4)
    put(cache, A + B + C + D)
    table: list[int] = []
    for left in (3, 2, 1, 0):
        assert cache.extend(table, (len(table) + 1) * BLOCK)
        assert hits(cache, A + B + C + D) == cache.cached == left
        cache.check([table])


def test_the_least_recently_used_goes_first():
    cache = cache_of(6)
    put(cache, A + B)
    put(cache, B + C)
    put(cache, C + D)
    put(cache, A + B)
    take(cache, 2)
    assert [hits(cache, text) for text in (A + B, B + C, C + D)] == [2, 0, 2]
    take(cache, 1)
    assert [hits(cache, text) for text in (A + B, B + C, C + D)] == [2, 0, 1]


def test_free_blocks_are_taken_before_cached_ones():
    cache = cache_of(6)
    put(cache, A + B)
    take(cache, 4)
    assert hits(cache, A + B) == 2


def test_a_head_that_is_in_use_outlives_its_tail():
    cache = cache_of(3)
    head = compute(cache, A + B[:1])
    put(cache, A + B)
    assert cache.match("", [*A, *B, 9])[0] == head.blocks[0]
    take(cache, 1)
    assert hits(cache, A + B) == 1
    assert not cache.extend([], BLOCK), "what is in use is not reclaimed"


def test_too_few_blocks_change_nothing():
    cache = cache_of(4)
    put(cache, A + B)
    used = take(cache, 1)
    table: list[int] = []
    found = cache.match("", [*A, 9])
    for refused in (
        cache.extend(table, 4 * BLOCK),
        cache.open(table, found, 5 * BLOCK),
        # three can be handed out, one of them is found: two for itself, one more is asked for in reserve
        cache.open(table, found, 3 * BLOCK, spare=1),
    ):
        assert refused is False
        assert table == []
        assert (cache.free, cache.used, cache.cached) == (1, 1, 2)
        assert hits(cache, A + B) == 2
        cache.check([used])
    assert cache.open(table, found, 2 * BLOCK, spare=1)


def test_blocks_for():
    assert [blocks_for(tokens, 4) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


# Retaining


def test_retained_blocks_are_not_reclaimed_until_their_time_ends():
    cache = cache_of(4, retain_limit=4)
    put_retained(cache, A + B, until=10.0)
    table = take(cache, 2)
    assert not cache.extend(table, 3 * BLOCK)
    cache.begin(9.9)
    assert not cache.extend(table, 3 * BLOCK)
    assert (cache.free, cache.used, cache.cached, cache.retained) == (0, 2, 2, 2)
    cache.begin(10.0)
    assert cache.retained == 0
    assert hits(cache, A + B) == 2, "until somebody needs them they are still found"
    assert cache.extend(table, 3 * BLOCK)
    assert hits(cache, A + B) == 1


def test_pinned_blocks_stay():
    cache = cache_of(4, retain_limit=4)
    blocks = put_retained(cache, A + B, until=math.inf)
    cache.begin(1e12)
    take(cache, 2)
    assert cache.pinned() == 2
    assert cache.match("", [*A, *B, 9]) == blocks


def test_a_later_time_wins():
    cache = cache_of(4, retain_limit=4)
    put_retained(cache, [*A, 9], until=20.0)
    put_retained(cache, [*A, 9], until=10.0)
    cache.begin(15.0)
    assert cache.retained == 1
    put_retained(cache, [*A, 9], until=30.0)
    cache.begin(25.0)
    assert cache.retained == 1
    cache.begin(30.0)
    assert cache.retained == 0


def test_each_expires_in_its_time():
    cache = cache_of(8, retain_limit=8)
    for text, until in ((A, 30.0), (B, 10.0), (C, 20.0)):
        put_retained(cache, text, until)
    for now, left in ((9.0, 3), (10.0, 2), (19.0, 2), (25.0, 1), (40.0, 0)):
        cache.begin(now)
        assert cache.retained == left


def test_above_the_limit_the_first_to_expire_make_room(caplog):
    cache = cache_of(8, retain_limit=3)
    put_retained(cache, A + B, until=10.0)
    put_retained(cache, C + D, until=20.0)
    assert cache.retained == 3
    assert "retain_memory is full: 1 blocks" in caplog.text
    take(cache, 5)
    assert [hits(cache, text) for text in (A + B, C + D)] == [1, 2]


def test_a_shared_prefix_is_retained_for_as_long_as_any_wants():
    cache = cache_of(6, retain_limit=6)
    put_retained(cache, A + B, until=10.0)
    put_retained(cache, A + C, until=20.0)
    assert cache.retained == 3
    cache.begin(15.0)
    assert cache.retained == 2
    take(cache, 4)
    assert [hits(cache, text) for text in (A + B, A + C)] == [1, 2]


def test_expired_blocks_are_reclaimed_from_their_end():
    cache = cache_of(4, retain_limit=4)
    put_retained(cache, A + B + C + D, until=10.0)
    cache.begin(10.0)
    for left in (3, 2, 1, 0):
        take(cache, 1)
        assert hits(cache, A + B + C + D) == left


def test_retained_blocks_in_use_go_on_being_retained():
    cache = cache_of(4, retain_limit=4)
    put_retained(cache, A + B, until=10.0)
    user = compute(cache, A + B + C[:1])
    assert (cache.used, cache.cached, cache.retained) == (3, 0, 2)
    cache.release(user.blocks)
    assert (cache.used, cache.cached, cache.retained) == (0, 2, 2)
    user = compute(cache, A + B + C[:1])
    cache.begin(10.0)
    cache.check([user.blocks])
    cache.release(user.blocks)
    take(cache, 4)
    assert cache.cached == 0


def test_stop_retaining_lets_everything_go():
    cache = cache_of(4, retain_limit=4)
    assert not cache.stop_retaining()
    put_retained(cache, A + B, until=math.inf)
    put_retained(cache, C + D, until=10.0)
    assert cache.stop_retaining()
    assert (cache.retained, cache.cached) == (0, 4)
    take(cache, 4)


# Forgetting


def test_flush_forgets_and_frees():
    cache = cache_of(6, retain_limit=6)
    put(cache, A + B)
    put_retained(cache, C, until=math.inf)
    assert cache.flush() == 3
    assert (cache.free, cache.retained) == (6, 0)
    assert [hits(cache, text) for text in (A + B, C)] == [0, 0]
    assert cache.flush() == 0


def test_flush_while_a_sequence_runs():
    cache = cache_of(6)
    running = compute(cache, A + B + C[:1])
    assert cache.flush() == 2
    cache.check([running.blocks])
    assert cache.used == 3
    running.tokens += [5] * BLOCK
    assert cache.extend(running.blocks, len(running.tokens))
    cache.list_computed(running, len(running.tokens))
    assert running.listed == 2, "what follows a forgotten block can't be reached"
    cache.check([running.blocks])
    put(cache, A + B)
    assert cache.follow(running) == 0
    cache.release(running.blocks)
    assert (cache.free, cache.cached) == (4, 2)
    assert hits(cache, A + B) == 2


def test_a_failed_step_unlists_what_it_was_to_compute():
    cache = cache_of(6)
    put(cache, A)
    cache.begin(0.0)
    sequence = compute(cache, A + B + C)
    cache.drop_fresh()
    cache.check([sequence.blocks])
    assert hits(cache, A + B) == 1
    cache.drop_fresh()
    assert cache.match("", sequence.tokens) == sequence.blocks[:1]
    cache.release(sequence.blocks)
    assert (cache.free, cache.cached) == (5, 1)


# Cost


def lookup_and_release(cached: int) -> float:
    """Median seconds to look up and let go of 64 blocks, among ``cached`` others."""
    cache = cache_of(cached + 100)
    for number in range(cached):
        put(cache, [number] * BLOCK)
    text = [token for number in range(64) for token in [number, 7, 7, 7]]
    put(cache, text)
    times = []
    for _ in range(31):
        begun = time.thread_time()
        table: list[int] = []
        found = cache.match("", text)
        assert cache.open(table, found, len(text))
        cache.release(table)
        times.append(time.thread_time() - begun)
        assert len(found) == 63
    return statistics.median(times)


def test_lookup_and_release_do_not_depend_on_the_pool():
    small, large = (min(lookup_and_release(cached) for _ in range(3)) for cached in (500, 20_000))
    assert large < 2 * small


# The check


def _used(cache: BlockCache) -> int:
    return next(number for number, block in enumerate(cache._blocks) if block.tables)


def _cached_head(cache: BlockCache) -> int:
    return cache.match("", [*C, 9])[0]


def _forget_the_head(cache: BlockCache) -> None:
    """What continues it stays listed."""
    head = _cached_head(cache)
    cache._unlist(head)
    del cache._idle[head]
    cache._free.append(head)


BREAKERS = {
    "lost": lambda cache: cache._free.pop(),
    "twice free": lambda cache: cache._free.append(cache._free[0]),
    "free instead of another": lambda cache: cache._free.__setitem__(0, cache._free[1]),
    "free and used": lambda cache: cache._free.__setitem__(0, _used(cache)),
    "free and cached": lambda cache: cache._free.__setitem__(0, next(iter(cache._idle))),
    "cached and kept": lambda cache: cache._idle.__setitem__(next(iter(cache._kept)), None),
    "leaked": lambda cache: setattr(cache._blocks[_used(cache)], "tables", 2),
    "counted too low": lambda cache: setattr(cache._blocks[_used(cache)], "tables", 0),
    "cached but not listed": lambda cache: cache._unlist(next(iter(cache._idle))),
    "can't be reached": _forget_the_head,
    "finds another": lambda cache: cache._listed.update(dict.fromkeys(cache._listed, 0)),
    "finds what is not listed": lambda cache: cache._listed.update({KEY_TYPES[""]("", (7, 7, 7, 7)): cache._free[0]}),
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
    with pytest.raises(AssertionError, match="counts 1 tables, is in 0"):
        cache.check([])
    with pytest.raises(AssertionError, match="counts 1 tables, is in 2"):
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
