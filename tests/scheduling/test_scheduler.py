"""What a step computes: order, budget, admission, and what planning costs. No tensors."""

import statistics
import time
import weakref
from unittest import mock

import pytest

from kvloom.request import Request, SamplingParams, Sequence
from kvloom.scheduling.scheduler import AGEING_S
from support.block_rig import BLOCK, Rig, counts, unlike

# Budget


def test_decodes_run_beside_prefill_chunks():
    rig = Rig(max_batch_tokens=16)
    short = rig.add(unlike(3))
    rig.step()
    long = rig.add(unlike(50))
    chunks = []
    while not long.generated:
        plan = counts(rig.step())
        assert plan[short] == 1, "the long prompt held up a running stream"
        chunks.append(plan[long])
    assert chunks == [15, 15, 15, 5]


def test_decodes_come_before_a_prefill_that_ranks_higher():
    rig = Rig(max_batch_tokens=4)
    decoding = [rig.add(unlike(1), arrival=1.0) for _ in range(3)]
    rig.step()
    long = rig.add(unlike(30), arrival=0.0)
    for _ in range(3):
        assert counts(rig.step()) == dict.fromkeys(decoding, 1) | {long: 1}


def test_budget_and_running_limits_hold():
    rig = Rig(max_running=5, max_batch_tokens=20)
    for _ in range(12):
        rig.add(unlike(9))
    for _ in range(10):
        assert sum(counts(rig.step()).values()) <= 20
        assert len(rig.scheduler.running) <= 5
    assert len(rig.scheduler.running) == 5
    assert len(rig.scheduler.waiting) == 7


class Name(str):
    """A request's id that can be watched."""


def test_who_left_is_not_kept_behind_one_that_waits():
    rig = Rig(max_running=1)
    for _ in range(2):
        rig.add(unlike(30))
    rig.step()
    names = [Name(number) for number in range(200)]
    left = [weakref.ref(name) for name in names]
    while names:
        rig.remove(rig.add(unlike(4), id=names.pop()))
    assert sum(name() is not None for name in left) < 100
    rig.run()


def test_a_budget_of_one_serves_one_after_the_other():
    rig = Rig(max_batch_tokens=1, blocks=4)
    for _ in range(3):
        rig.add(unlike(5))
    rig.run()
    assert rig.cache.used == 0


# Order


def admitted_order(rig: Rig, waiting: list[Sequence]) -> list[Sequence]:
    """The order in which sequences are let in, one at a time."""
    order = []
    for _ in waiting:
        rig.step()
        [running] = rig.scheduler.running
        order.append(running)
        rig.remove(running)
    return order


def test_priority_then_arrival():
    rig = Rig(max_running=1)
    later_high = rig.add(unlike(3), priority=2, arrival=0.2)
    low = rig.add(unlike(3), priority=-1, arrival=0.0)
    first = rig.add(unlike(3), arrival=0.0)
    high = rig.add(unlike(3), priority=2, arrival=0.1)
    second = rig.add(unlike(3), arrival=0.1)
    same_moment = rig.add(unlike(3), arrival=0.1)
    expected = [high, later_high, first, second, same_moment, low]
    assert admitted_order(rig, expected) == expected


def test_waiting_gains_a_level_of_priority_in_five_seconds():
    assert AGEING_S == 5
    rig = Rig(max_running=1)
    old = rig.add(unlike(3), priority=0, arrival=100.0)
    just_too_late = rig.add(unlike(3), priority=1, arrival=105.1)
    just_in_time = rig.add(unlike(3), priority=1, arrival=104.9)
    far_above = rig.add(unlike(3), priority=10, arrival=149.0)
    expected = [far_above, just_in_time, old, just_too_late]
    assert admitted_order(rig, expected) == expected


def test_nobody_overtakes_the_first_that_does_not_fit():
    rig = Rig(blocks=5)
    big, second, third = (rig.add(unlike(length)) for length in (10, 10, 2))
    rig.step()
    assert rig.scheduler.running == [big]
    assert set(rig.scheduler.waiting) == {second, third}
    urgent = rig.add(unlike(2), priority=1)
    rig.remove(third)
    rig.remove(big)
    rig.step()
    assert rig.scheduler.running == [urgent, second]


@pytest.mark.parametrize(("length", "admitted"), [(5, False), (4, True)])
def test_blocks_that_the_next_step_needs_stay_in_reserve(length, admitted):
    rig = Rig(blocks=5)
    running = [rig.add(unlike(3)), rig.add(unlike(3))]
    rig.step()
    # both fill their block: of three free ones, two are in reserve
    waiting = rig.add(unlike(length))
    rig.step()
    assert rig.scheduler.running == ([*running, waiting] if admitted else running)


# Cost


def planning_time(rig: Rig, steps: int = 31) -> float:
    """Median seconds of plan(), without those in which others had the core."""
    times = []
    for _ in range(steps):
        begun = time.thread_time()
        plan = rig.scheduler.plan()
        times.append(time.thread_time() - begun)
        for piece in plan.slices:
            piece.sequence.computed = piece.start + piece.count
            if piece.samples:
                piece.sequence.tokens.append(7)
    return statistics.median(times)


def loaded(waiting: int, fits: bool) -> Rig:
    """256 decoding sequences, and ``waiting`` others; the first of those does not fit or has no turn."""
    rig = Rig(blocks=100_000 if fits else 256 * 20, max_running=256 if fits else 300, max_batch_tokens=4096)
    for _ in range(256):
        rig.add(unlike(8))
    rig.step()
    assert len(rig.scheduler.running) == 256
    if not fits:
        rig.add(unlike(256 * 20 * BLOCK))
    for number in range(waiting):
        request = Request(id="", prompt_ids=(number, 1, 2), params=SamplingParams(), arrival=1.0, priority=number % 3)
        rig.scheduler.add(Sequence(request))
    return rig


def test_who_waits_is_not_looked_up_anew_in_every_step():
    rig = Rig(blocks=200, max_batch_tokens=1000)
    known = unlike(100 * BLOCK)
    first = rig.add(known)
    rig.step()
    rig.remove(first)
    running = rig.add(unlike(90 * BLOCK))
    rig.step()
    late = rig.add([*known, *range(50 * BLOCK)])
    with mock.patch.object(rig.cache._index, "_key", wraps=rig.cache._index._key) as key:
        rig.step()
        assert key.call_count > 100
        key.reset_mock()
        with mock.patch.object(rig, "check"):
            for _ in range(5):
                rig.step()
        assert key.call_count <= 2 * 5, "blocks that were found before are looked up again"
    rig.remove(running)
    rig.step()
    assert late.cached == 100 * BLOCK


@pytest.mark.parametrize("fits", [True, False])
def test_planning_does_not_grow_with_who_waits(fits):
    thousand, ten_thousand = (min(planning_time(loaded(count, fits)) for _ in range(3)) for count in (1000, 10_000))
    assert ten_thousand < 2 * thousand


def test_who_left_while_too_few_blocks_were_free_is_not_kept_alive():
    rig = Rig(blocks=10)
    rig.add(unlike(9 * BLOCK))
    rig.step()
    waiting = rig.add(unlike(3 * BLOCK))
    rig.step()
    assert rig.scheduler._found_for is waiting
    rig.remove(waiting)
    assert rig.scheduler._found_for is None
