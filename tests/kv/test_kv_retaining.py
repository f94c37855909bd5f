"""The block cache: what is kept for longer, and what is forgotten."""

import math

from support.block_cache import A, B, C, D, cache_of, compute, hits, put, put_retained, take
from support.block_rig import BLOCK

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


def test_nobody_takes_a_pinned_blocks_place(caplog):
    cache = cache_of(8, retain_limit=3)
    pinned = put_retained(cache, A + B, until=math.inf)
    put_retained(cache, [*C, 9], until=20.0)
    for until in (10.0, math.inf):
        put_retained(cache, D + C + B, until)
        assert cache.match("", [*A, *B, 9]) == pinned
        assert cache.pinned() == (2 if until == 10.0 else 3)
        assert cache.retained == 3
    assert "retain_memory is full: 3 blocks are not retained" in caplog.text
    take(cache, 5)
    assert [hits(cache, text) for text in (A + B, C, D + C)] == [2, 0, 1]


def test_what_grows_is_retained_from_its_beginning():
    cache = cache_of(8, retain_limit=3)
    put_retained(cache, A + B, until=math.inf)
    put_retained(cache, A + B + C + D, until=math.inf)
    assert cache.pinned() == 3
    take(cache, 5)
    assert hits(cache, A + B + C + D) == 3


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
    cache.hash_computed(running, len(running.tokens))
    assert running.hashed == 2, "what follows a forgotten block can't be reached"
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
