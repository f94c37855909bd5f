"""The block cache: what is found, what is reclaimed first, and what a look-up costs."""

import math
import statistics
import time

import pytest

from kvloom.kv.blocks import blocks_for
from kvloom.kv.prefix_index import KEY_TYPES
from kvloom.request import Request, SamplingParams, Sequence
from support.block_cache import A, B, C, D, cache_of, compute, hits, put, take
from support.block_rig import BLOCK

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
        cache.hash_computed(sequence, 2 * BLOCK)
    assert (first.hashed, second.hashed) == (2, 0)
    assert cache.follow(second) == 2 * BLOCK
    assert second.blocks[:2] == first.blocks[:2]
    assert (second.hashed, second.computed, cache.used) == (2, 2 * BLOCK, 4)
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
    assert (sequence.hashed, cache.retained) == (0, 0)
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
