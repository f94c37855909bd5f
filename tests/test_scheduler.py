"""Scheduling and the block pool, without tensors: every sequence completes, nothing leaks, limits hold."""

import random
import time

import pytest

from kvloom.kv.blocks import BlockPool
from kvloom.request import Request, SamplingParams, Sequence
from kvloom.scheduler import Scheduler

BLOCK = 4


def sequence(prompt: int) -> Sequence:
    return Sequence(Request(id="", prompt_ids=tuple(range(1, prompt + 1)), params=SamplingParams(), arrival=0.0))


def advance(scheduler: Scheduler) -> list[Sequence]:
    """Do what the engine does with a plan, without computing; returns the sequences that got a token."""
    grown = []
    for piece in scheduler.plan():
        assert piece.start == piece.sequence.computed
        assert len(piece.sequence.blocks) * BLOCK >= piece.start + piece.count
        piece.sequence.computed += piece.count
        if piece.samples:
            piece.sequence.tokens.append(7)
            grown.append(piece.sequence)
    return grown


def check(pool: BlockPool, scheduler: Scheduler) -> None:
    tables = [block for s in scheduler.running for block in s.blocks]
    assert len(tables) == len(set(tables)) == pool.used
    assert pool.free + pool.used == pool.total
    assert all(not s.blocks and not s.computed for s in scheduler.waiting)


def test_decodes_run_beside_prefill_chunks():
    scheduler = Scheduler(BlockPool(100, BLOCK), max_running=8, max_batch_tokens=16)
    short, long = sequence(3), sequence(50)
    scheduler.add(short)
    assert advance(scheduler) == [short]
    scheduler.add(long)
    steps = 0
    while long.pending > 1 or long.generated == 0:
        grown = advance(scheduler)
        assert short in grown, "the long prompt held up a running stream"
        steps += 1
    # 15 tokens of each step's 16 are left for the prompt
    assert steps == 4


def test_budget_and_running_limits_hold():
    scheduler = Scheduler(BlockPool(1000, BLOCK), max_running=5, max_batch_tokens=20)
    for _ in range(12):
        scheduler.add(sequence(9))
    for _ in range(10):
        slices = scheduler.plan()
        assert sum(piece.count for piece in slices) <= 20
        assert len(scheduler.running) <= 5
        for piece in slices:
            piece.sequence.computed += piece.count
            if piece.samples:
                piece.sequence.tokens.append(7)
    assert len(scheduler.running) == 5
    assert len(scheduler.waiting) == 7


def test_arrival_order_is_kept():
    scheduler = Scheduler(BlockPool(4, BLOCK), max_running=8, max_batch_tokens=64)
    big, second, third = sequence(10), sequence(10), sequence(2)
    for s in (big, second, third):
        scheduler.add(s)
    scheduler.plan()
    # the second does not fit beside the first, and the third does not overtake it
    assert scheduler.running == [big]
    assert list(scheduler.waiting) == [second, third]


def test_preempted_sequence_keeps_its_tokens_and_completes():
    pool = BlockPool(6, BLOCK)
    scheduler = Scheduler(pool, max_running=8, max_batch_tokens=64)
    sequences = [sequence(6) for _ in range(3)]
    for s in sequences:
        scheduler.add(s)
    done = []
    for _ in range(200):
        for s in advance(scheduler):
            check(pool, scheduler)
            if s.generated == 10:
                scheduler.remove(s)
                done.append(s)
    assert sorted(map(id, done)) == sorted(map(id, sequences))
    assert scheduler.preemptions > 0
    assert pool.used == 0


@pytest.mark.parametrize("seed", range(20))
def test_random_life_leaks_nothing(seed):
    rng = random.Random(seed)
    pool = BlockPool(rng.randint(5, 40), BLOCK)
    scheduler = Scheduler(pool, max_running=rng.randint(1, 6), max_batch_tokens=rng.randint(6, 30))
    alive: list[Sequence] = []
    arrived = finished = 0
    while finished < 60:
        if arrived < 60 and rng.random() < 0.4:
            s = sequence(rng.randint(1, (pool.total - 1) * BLOCK))
            scheduler.add(s)
            alive.append(s)
            arrived += 1
        if alive and rng.random() < 0.05:
            s = alive.pop(rng.randrange(len(alive)))
            scheduler.remove(s)
            finished += 1
        for s in advance(scheduler):
            # as the engine does: a sequence ends before it outgrows the whole pool
            if s in alive and (rng.random() < 0.2 or len(s.tokens) > pool.total * BLOCK):
                scheduler.remove(s)
                alive.remove(s)
                finished += 1
        check(pool, scheduler)
    assert pool.used == 0


def test_releasing_twice_is_caught():
    pool = BlockPool(4, BLOCK)
    table: list[int] = []
    assert pool.extend(table, 9)
    stale = list(table)
    pool.release(table)
    assert table == []
    with pytest.raises(AssertionError):
        pool.release(stale)


def test_failed_extension_changes_nothing():
    pool = BlockPool(4, BLOCK)
    table: list[int] = []
    assert pool.extend(table, 8)
    before = list(table)
    assert not pool.extend(table, 17)
    assert table == before
    assert pool.free == 2


def test_a_step_is_planned_quickly():
    pool = BlockPool(100_000, BLOCK)
    scheduler = Scheduler(pool, max_running=256, max_batch_tokens=4096)
    for _ in range(10_000):
        scheduler.add(sequence(8))
    advance(scheduler)
    assert len(scheduler.running) == 256
    times = []
    for _ in range(20):
        begin = time.perf_counter()
        slices = scheduler.plan()
        times.append(time.perf_counter() - begin)
        for piece in slices:
            piece.sequence.computed += piece.count
            piece.sequence.tokens.append(7)
    assert sorted(times)[10] < 2e-3
