"""What a sequence takes over from others, and what is retained for those to come. No tensors."""

import pytest

from kvloom.request import Sequence
from kvloom.scheduling import scheduler
from support.block_rig import BLOCK, Clock, Rig, counts, unlike

# Sharing


def test_a_prefix_is_computed_once_within_a_step():
    rig = Rig(max_batch_tokens=100)
    prefix = list(range(5 * BLOCK))
    sequences = [rig.add([*prefix, 100 + number]) for number in range(4)]
    plan = rig.step()
    assert [piece.count for piece in plan.slices] == [21, 1, 1, 1]
    assert all(sequence.blocks[:5] == sequences[0].blocks[:5] for sequence in sequences)
    assert rig.cache.used == 5 + 4
    assert [sequence.cached for sequence in sequences] == [0, 20, 20, 20]
    assert (rig.scheduler.prefix_queried, rig.scheduler.prefix_hit) == (84, 60)


def test_a_prefix_is_computed_once_while_it_comes_in_chunks():
    rig = Rig(max_batch_tokens=8)
    prompt = list(range(6 * BLOCK))
    for _ in range(3):
        rig.add(prompt)
    computed = 0
    while any(not sequence.generated for sequence in rig.alive):
        computed += sum(piece.count for piece in rig.step().slices if not piece.sequence.generated)
    # each one's last block holds the token that has to be computed
    assert computed <= len(prompt) + 2 * BLOCK + 3
    assert rig.cache.used <= 6 + 2 * 2


def test_the_last_token_is_computed_even_if_everything_is_cached():
    rig = Rig()
    prompt = list(range(3 * BLOCK))
    rig.add(prompt)
    rig.step()
    again = rig.add(prompt)
    assert counts(rig.step())[again] == BLOCK
    assert again.generated == 1
    assert again.cached == 2 * BLOCK


def test_generated_tokens_are_reused():
    rig = Rig()
    first = rig.add(range(6))
    for _ in range(11):
        rig.step()
    tokens = list(first.tokens)
    rig.remove(first)
    turn = rig.add([*tokens, 50, 51])
    rig.step()
    assert len(tokens) == 17
    assert turn.cached == 4 * BLOCK


# Retaining


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(scheduler, "time", clock)
    return clock


def answer_once(rig: Rig, prompt: list[int], **request: object) -> Sequence:
    """A request that ends with its first token."""
    sequence = rig.add(prompt, **request)
    while not sequence.generated:
        rig.step()
    if sequence in rig.alive:
        rig.remove(sequence)
    return sequence


def test_a_retained_prompt_outlives_others_until_its_time_ends(clock):
    rig = Rig(blocks=6, retain_limit=3)
    prompt = unlike(3 * BLOCK)
    answer_once(rig, prompt, retain_s=60)
    for _ in range(5):
        answer_once(rig, unlike(8))
    clock.now += 59
    assert answer_once(rig, [*prompt, 5]).cached == 3 * BLOCK
    clock.now += 1
    for _ in range(5):
        answer_once(rig, unlike(20))
    assert answer_once(rig, [*prompt, 5]).cached == 0


@pytest.mark.parametrize("again", [{"retain_s": 60}, {"retain_s": -1}], ids=str)
def test_asking_again_retains_all_of_a_prompt_for_longer(clock, again):
    rig = Rig(blocks=6, retain_limit=3)
    prompt = unlike(3 * BLOCK)
    answer_once(rig, prompt, retain_s=60)
    clock.now += 30
    answer_once(rig, prompt, **again)
    clock.now += 59
    rig.step()
    assert rig.cache.retained == 3


def test_the_answer_is_not_retained(clock):
    rig = Rig(blocks=20, retain_limit=20)
    sequence = rig.add(unlike(6), retain_s=-1)
    while sequence.generated < 20:
        rig.step()
    rig.remove(sequence)
    assert rig.cache.retained == 1


def test_what_was_cancelled_before_it_ran_retains_nothing():
    rig = Rig(retain_limit=20)
    rig.remove(rig.add(unlike(9), retain_s=-1))
    assert rig.cache.retained == 0


def test_a_pool_full_of_pinned_blocks_still_serves():
    rig = Rig(blocks=6, retain_limit=6)
    answer_once(rig, unlike(6 * BLOCK), retain_s=-1)
    assert rig.cache.pinned() == 6
    answer_once(rig, unlike(5))
    assert rig.cache.pinned() < 6


def test_a_sequence_grows_into_pinned_blocks_when_it_is_alone():
    rig = Rig(blocks=6, retain_limit=6)
    answer_once(rig, unlike(4 * BLOCK), retain_s=-1)
    first, second = rig.add(unlike(4)), rig.add(unlike(4))
    rig.run()
    assert len(first.tokens) == len(second.tokens) == 6 * BLOCK + 1
    assert rig.cache.pinned() == 0
