"""Who gives its blocks away, how, and what a failed step leaves. No tensors."""

import pytest

from kvloom.request import Sequence
from kvloom.scheduling.scheduler import Costs
from support.block_rig import ALWAYS_SWAP, BLOCK, NEVER_SWAP, Rig, counts, unlike


def crowd(rig: Rig, **requests: dict[str, object]) -> dict[str, Sequence]:
    """Sequences of two blocks each, grown until one of them gave its blocks away."""
    names = {name: rig.add(unlike(6), **request) for name, request in requests.items()}
    rig.step()
    assert len(rig.scheduler.running) == len(names)
    while not len(rig.scheduler.waiting):
        rig.step()
    return names


def test_the_lowest_priority_gives_its_blocks_away_then_the_latest():
    rig = Rig(blocks=9)
    names = crowd(rig, low={"priority": -1}, early={"arrival": 0.1}, late={"arrival": 0.2})
    assert set(rig.scheduler.waiting) == {names["low"]}
    rig.remove(names["low"])
    while not len(rig.scheduler.waiting):
        rig.step()
    assert set(rig.scheduler.waiting) == {names["late"]}


def test_an_urgent_newcomer_does_not_throw_out_who_runs():
    rig = Rig(blocks=4)
    running = rig.add(unlike(14))
    rig.step()
    rig.add(unlike(2), priority=100)
    rig.step()
    assert rig.scheduler.running == [running]
    assert running.preemptions == 0


@pytest.mark.parametrize(
    ("host", "costs", "swaps"),
    [
        (50, ALWAYS_SWAP, True),
        (50, NEVER_SWAP, False),
        (0, ALWAYS_SWAP, False),
        (1, ALWAYS_SWAP, False),
        # 12 tokens in 3 blocks
        (50, Costs(copy_block_s=1.0, compute_token_s=0.4), False),
        (50, Costs(copy_block_s=1.0, compute_token_s=0.8), True),
    ],
    ids=str,
)
def test_swap_or_recompute_as_cost_and_host_space_say(host, costs, swaps):
    rig = Rig(blocks=6, host=host, costs=costs)
    names = crowd(rig, first={}, second={})
    victim = names["second"]
    assert set(rig.scheduler.waiting) == {victim}
    assert (rig.scheduler.swaps, rig.scheduler.recomputes) == ((1, 0) if swaps else (0, 1))
    assert victim.preemptions == 1
    assert victim.blocks == []
    assert rig.host.used == len(victim.host_blocks) == (3 if swaps else 0)
    tokens = list(victim.tokens)
    # what was its cache goes to others meanwhile
    rig.remove(names["first"])
    rig.cache.flush()
    rig.add(unlike(3), priority=1)
    plan = counts(rig.step())
    assert plan[victim] == (1 if swaps else len(tokens))
    assert victim.tokens[:-1] == tokens
    assert rig.host.used == 0
    rig.run()


def test_costs():
    costs = Costs(copy_block_s=1.0, compute_token_s=0.5)
    assert costs.swap_pays(blocks=2, tokens=9)
    assert not costs.swap_pays(blocks=2, tokens=8)


def test_what_is_still_cached_is_not_copied_back():
    rig = Rig(blocks=6, host=50, costs=ALWAYS_SWAP)
    names = crowd(rig, first={}, second={})
    rig.remove(names["first"])
    plan = rig.step()
    assert [piece.count for piece in plan.slices] == [1]
    assert len(plan.swap_in) < 3, "its full blocks were not reclaimed yet"


def test_a_swapped_sequence_that_ends_frees_the_host():
    rig = Rig(blocks=6, host=50, costs=ALWAYS_SWAP)
    victim = crowd(rig, first={}, second={})["second"]
    assert rig.host.used
    rig.remove(victim)
    assert rig.host.used == 0
    rig.check()


@pytest.mark.parametrize("host", [0, 3, 50])
def test_under_pressure_everyone_ends(host):
    rig = Rig(blocks=8, host=host, costs=ALWAYS_SWAP)
    for _ in range(10):
        rig.add(unlike(6))
    rig.run()
    assert rig.scheduler.recomputes > 0 or host == 50
    assert rig.scheduler.swaps > 0 or host == 0
    assert rig.cache.used == rig.host.used == 0


def test_preemption_counts_no_hits_of_its_own_blocks():
    rig = Rig(blocks=6)
    names = crowd(rig, first={}, second={})
    rig.remove(names["first"])
    rig.step()
    assert rig.scheduler.running == [names["second"]]
    assert rig.scheduler.prefix_hit == names["second"].cached == 0


# A failing step


def test_a_failed_step_leaves_nothing_to_be_found():
    rig = Rig(max_batch_tokens=100)
    prompt = list(range(4 * BLOCK))
    rig.add([*prompt, 1])
    rig.add([*prompt, 2])
    assert len(rig.failing_step().slices) == 2
    assert not rig.alive
    assert rig.cache.free == rig.cache.total
    again = rig.add([*prompt, 1])
    rig.step()
    assert again.cached == 0


def test_a_failed_step_keeps_what_earlier_steps_computed():
    rig = Rig(max_batch_tokens=8)
    prompt = list(range(6 * BLOCK))
    rig.add(prompt)
    rig.step()
    rig.failing_step()
    again = rig.add(prompt)
    rig.step()
    assert again.cached == 8


def test_who_gave_its_blocks_away_survives_a_failed_step():
    rig = Rig(blocks=6, host=50, costs=ALWAYS_SWAP)
    first, second = rig.add(unlike(6)), rig.add(unlike(6))
    while rig.cache.free:
        rig.step()
    while second.computed and first.computed % BLOCK != 0:
        rig.step()
    plan = rig.failing_step()
    assert [piece.sequence for piece in plan.slices] == [first]
    assert plan.swap_out
    assert rig.alive == [second]
    rig.run()
