"""Conversations in an engine without Triton: what they compute, keep, lose and say about it."""

import time

import pytest
from transformers import AutoTokenizer

from kvloom.errors import Cancelled, InvalidArgument, NotFound, Unavailable
from kvloom.request import FinishReason
from support.block_rig import ALWAYS_SWAP, NEVER_SWAP
from support.talks import talks
from support.tiny_models import make_tiny
from support.tiny_server import tokens


def test_a_turn_computes_only_what_is_new(model, stateless):
    driver = talks(model, prefix_cache="false")
    history = []
    for turn in range(20):
        new = tokens(turn, 11)
        answer = driver.say("chat", new, start=turn == 0)
        history += new
        assert answer.usage.prompt_tokens == len(history)
        assert answer.usage.prompt_tokens - answer.usage.cached_tokens <= len(new) + 1
        assert answer.ids == stateless(history)
        history += answer.ids
        assert driver.turns.status("chat").tokens == len(history)
    assert driver.engine.stats().conversations == 1
    driver.end_all()
    assert driver.engine.stats().conversations == 0


@pytest.mark.parametrize("costs", [ALWAYS_SWAP, NEVER_SWAP])
@pytest.mark.parametrize("swap_memory", ["1MiB", "64KB", "0"])
def test_more_conversations_than_memory(model, stateless, costs, swap_memory):
    driver = talks(model, costs, kv_blocks=24, swap_memory=swap_memory)
    histories = {number: [] for number in range(12)}
    swapped = set()
    for turn in range(4):
        for number, history in histories.items():
            new = tokens(100 * turn + number, 13)
            history += new
            answer = driver.say(number, new, start=turn == 0)
            assert answer.ids == stateless(history)
            history += answer.ids
            swapped.add(driver.engine.stats().blocks_swapped)
    assert (max(swapped) > 0) == (costs is ALWAYS_SWAP and swap_memory != "0")
    driver.end_all()


def test_busy_conversations_share_too_little_memory(model, stateless):
    driver = talks(model, kv_blocks=10, swap_memory="64KB")
    histories = {number: tokens(number, 30) for number in range(8)}
    answers = {number: driver.turn(number, history, start=True) for number, history in histories.items()}
    for turn in range(4):
        driver.run_all()
        for number, history in histories.items():
            assert answers[number].ids == stateless(history)
            new = tokens(100 * turn + number, 9)
            history += [*answers[number].ids, *new]
            answers[number] = driver.turn(number, new)
    driver.run_all()
    driver.end_all()


def test_turns_wait_for_each_other_and_are_answered_in_order(model, stateless):
    driver = talks(model)
    prompts = [tokens(seed, 5) for seed in range(4)]
    answers = [driver.turn(7, prompt, start=not number) for number, prompt in enumerate(prompts)]
    other = driver.turn("7", prompts[2], start=True)
    assert driver.engine.stats().waiting == 5
    driver.run_all()
    history = []
    for prompt, answer in zip(prompts, answers, strict=True):
        history += prompt
        assert answer.ids == stateless(history)
        history += answer.ids
    assert other.ids == stateless(prompts[2])
    assert len(driver.turns.manager.registry) == 2
    driver.end_all()


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_barge_in_keeps_what_was_delivered(model, stateless, steps):
    driver = talks(model)
    first = driver.turn(7, tokens(1, 40), start=True, max_tokens=50)
    second = driver.turn(7, tokens(2, 5))
    for _ in range(steps):
        driver.engine.step()
    driver.turns.cancel_running(7)
    assert first.reason is FinishReason.CANCELLED
    assert len(first.ids) == steps
    driver.run_all()
    assert second.ids == stateless([*tokens(1, 40), *first.ids, *tokens(2, 5)])
    driver.end_all()


def test_a_queued_turn_that_is_cancelled_or_late_is_part_of_the_history(model, stateless):
    driver = talks(model)
    first = driver.turn(7, tokens(1, 5), start=True, max_tokens=30)
    left = driver.turn(7, tokens(2, 5))
    late = driver.turn(7, tokens(3, 5), deadline=time.monotonic() + 0.001)
    last = driver.turn(7, tokens(4, 5))
    driver.engine.cancel(left.sequence)
    assert (left.reason, left.ids) == (FinishReason.CANCELLED, [])
    time.sleep(0.002)
    driver.run_all()
    assert (late.reason, late.ids) == (FinishReason.DEADLINE, [])
    history = [*tokens(1, 5), *first.ids, *tokens(2, 5), *tokens(3, 5), *tokens(4, 5)]
    assert last.ids == stateless(history)
    driver.end_all()


def test_start_on_a_live_id_begins_anew(model, stateless):
    driver = talks(model)
    running = driver.turn(7, tokens(1, 5), start=True, max_tokens=50)
    queued = driver.turn(7, tokens(2, 5))
    driver.engine.step()
    again = driver.turn(7, tokens(3, 5), start=True)
    for answer in (running, queued):
        assert isinstance(answer.error, Cancelled)
        assert str(answer.error) == "CANCELLED: conversation restarted"
    driver.run_all()
    assert again.ids == stateless(tokens(3, 5))
    assert driver.say(7, tokens(4, 5)).ids == stateless([*tokens(3, 5), *again.ids, *tokens(4, 5)])
    assert len(driver.turns.manager.registry) == 1
    assert driver.engine.stats().finished == {"length": 2, "error": 2}
    driver.end_all()


def test_a_refused_start_keeps_a_live_conversation(model):
    driver = talks(model, max_queue=1, max_running=1)
    running = driver.turn(7, tokens(1, 5), start=True, max_tokens=50)
    driver.turn(8, tokens(1, 5), start=True)
    refused = driver.turn(7, tokens(3, 5), start=True)
    assert isinstance(refused.error, Unavailable)
    new = driver.turn(9, tokens(3, 5), start=True)
    assert str(new.error).startswith("UNAVAILABLE: queue full")
    driver.run_all()
    assert running.reason is FinishReason.LENGTH
    # a start leaves Triton's sequence begun; it is ended for the conversation that never was
    assert driver.triton.told == [("taken", 7), ("taken", 8), ("end", 9)]
    driver.end_all()


def test_end_ends_after_its_turn(model, stateless):
    driver = talks(model)
    first = driver.turn(7, tokens(1, 5), start=True, max_tokens=20)
    last = driver.turn(7, tokens(2, 5), end=True)
    after = driver.turn(7, tokens(2, 5))
    assert isinstance(after.error, NotFound)
    # sent before the last turn's final: both go on
    again = driver.turn(7, tokens(3, 5), start=True)
    driver.run_all()
    assert last.ids == stateless([*tokens(1, 5), *first.ids, *tokens(2, 5)])
    assert again.ids == stateless(tokens(3, 5))
    assert len(driver.turns.manager.registry) == 1
    assert ("end", 7) not in driver.triton.told
    driver.end_all()


def test_one_turn_conversations_do_not_count(model):
    driver = talks(model, max_conversations=1)
    driver.turn(1, tokens(1, 5), start=True)
    for number in range(2, 5):
        driver.turn(number, tokens(1, 5), start=True, end=True)
    assert len(driver.turns.manager.registry) == 1
    refused = driver.turn(9, tokens(1, 5), start=True)
    assert str(refused.error) == "UNAVAILABLE: max_conversations: all 1 conversations are busy"
    driver.run_all()
    assert driver.triton.told[-1] == ("end", 9)
    driver.end_all()


def test_the_least_recently_used_is_dropped_and_hears_of_it(model, stateless):
    driver = talks(model, max_conversations=2)
    one = driver.say(1, tokens(1, 5), start=True)
    driver.say(2, tokens(2, 5), start=True)
    second = driver.say(1, tokens(3, 5))
    assert second.ids == stateless([*tokens(1, 5), *one.ids, *tokens(3, 5)])
    driver.say(3, tokens(3, 5), start=True)
    assert len(driver.turns.manager.registry) == 2
    assert ("end", 2) not in driver.triton.told
    lost = driver.say(2, tokens(2, 5))
    assert str(lost.error) == "NOT_FOUND: conversation 2: evicted"
    assert driver.triton.told[-1] == ("end", 2)
    assert str(driver.say(2, tokens(2, 5)).error) == "NOT_FOUND: conversation 2: unknown"
    driver.end_all()


def test_idle_conversations_expire(model):
    driver = talks(model, conversation_idle_s=10)
    driver.say("a", tokens(1, 5), start=True)
    now = time.monotonic()
    driver.turn("b", tokens(1, 5), start=True)
    assert now + 9 < driver.engine.wakes_at <= now + 10
    driver.turns.manager.expire(now + 9)
    assert len(driver.turns.manager.registry) == 2
    driver.turns.manager.expire(now + 11)
    assert len(driver.turns.manager.registry) == 1
    # the busy one is not idle, however long it takes
    driver.turns.manager.expire(now + 1000)
    assert len(driver.turns.manager.registry) == 1
    driver.run_all()
    assert str(driver.say("a", tokens(2, 5)).error) == "NOT_FOUND: conversation a: expired"
    driver.end_all()


def test_the_oldest_of_too_many_dropped_ones_is_ended_in_triton(model):
    driver = talks(model, max_conversations=1)
    for number in range(1, 1027):
        driver.say(number, tokens(1, 2), start=True, max_tokens=1)
    assert [told for told in driver.triton.told if told[0] == "end"] == [("end", 1)]
    driver.end_all()


def test_a_turn_that_does_not_fit_is_refused(model, stateless):
    driver = talks(model, context_length=64)
    first = driver.say(7, tokens(1, 40), start=True)
    refused = driver.say(7, tokens(2, 16))
    assert isinstance(refused.error, InvalidArgument)
    assert str(refused.error) == "INVALID_ARG: prompt: has 64 tokens; context_length 64 takes at most 63"
    last = driver.say(7, tokens(2, 15))
    assert last.reason is FinishReason.LENGTH
    assert len(last.ids) == 1
    assert last.ids == stateless([*tokens(1, 40), *first.ids, *tokens(2, 15)])[:1]
    driver.end_all()


def test_what_the_first_turn_sets_can_not_be_changed(model):
    driver = talks(model)
    driver.say(7, tokens(1, 40), start=True, kv={"dtype": "auto"}, salt="mine")
    assert str(driver.say(7, tokens(1, 4), kv={"dtype": "fp32"}).error).startswith("INVALID_ARG: kv: ")
    assert str(driver.say(7, tokens(1, 4), salt="yours").error).startswith("INVALID_ARG: cache_salt: ")
    assert driver.say(7, tokens(1, 4), kv={"dtype": "auto"}, salt="mine").reason is FinishReason.LENGTH
    assert driver.say(7, tokens(1, 4)).usage.cached_tokens == 40 + 8 + 4 + 7
    driver.end_all()


def test_conversations_leave_their_blocks_to_the_prefix_cache(model, stateless):
    driver = talks(model, NEVER_SWAP, kv_blocks=24)
    prompt = tokens(1, 100)
    first = driver.say(1, prompt, start=True)
    for number in range(2, 5):
        driver.say(number, tokens(number, 100), start=True)
    # the first one has given its blocks away by now, and finds most of them again
    answer = driver.say(1, tokens(9, 3))
    assert answer.ids == stateless([*prompt, *first.ids, *tokens(9, 3)])
    assert 32 <= answer.usage.cached_tokens < 104
    driver.end_all()


def test_control(model):
    driver = talks(model)
    driver.turn(7, tokens(1, 20), start=True)
    driver.engine.step()
    assert driver.turns.status(7).busy
    ended = []
    driver.turn(7, tokens(2, 20))
    driver.turns.manager.end(7, lambda: ended.append("first"))
    assert isinstance(driver.turn(7, tokens(2, 20)).error, NotFound)
    assert not ended
    driver.run_all()
    assert ended == ["first"]
    assert driver.triton.told == [("taken", 7), ("end", 7)]
    driver.say(7, tokens(1, 20), start=True)
    status = driver.turns.status(7)
    assert (status.tokens, status.blocks, status.busy) == (28, 2, False)
    assert 0 <= status.idle_s < 10
    driver.turns.cancel_running(7)
    driver.turns.manager.end(7, lambda: ended.append("second"))
    assert ended == ["first", "second"]
    for op in (driver.turns.status, driver.turns.cancel_running, lambda id: driver.turns.manager.end(id, None)):
        with pytest.raises(NotFound, match="^NOT_FOUND: conversation 7: unknown$"):
            op(7)
    driver.assert_idle()


def test_a_follow_up_with_a_token_that_the_model_lacks_is_refused(tmp_path):
    folder = make_tiny(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = len(tokenizer)
    tokenizer.add_tokens(["[added]"])
    # as some fine-tuned models are published: the embedding has no row for it
    tokenizer.save_pretrained(folder)
    driver = talks(folder)
    first = driver.say("chat", messages=[{"role": "user", "content": "the cache"}], start=True)
    before = driver.turns.status("chat").tokens
    refused = driver.say("chat", messages=[{"role": "user", "content": "the [added]"}], repetition_penalty=1.5)
    assert isinstance(refused.error, InvalidArgument)
    assert str(refused.error) == f"INVALID_ARG: prompt: token {rows} has no embedding; ids are 0 to {rows - 1}"
    assert driver.turns.status("chat").tokens == before
    after = driver.say("chat", messages=[{"role": "user", "content": "the"}])
    assert list(after.sequence.request.prompt_ids[:before]) == [*first.sequence.request.prompt_ids, *first.ids]
    driver.end_all()


def test_a_conversation_grows_beyond_what_may_be_pinned_and_takes_nobodys_pin(model):
    driver = talks(model, kv_blocks=64, retain_memory="100KB")
    cache = driver.engine._cache
    limit, block = cache.retain_limit, cache.block_size
    others = tokens(1, (limit - 2) * block)
    driver.say(1, others, start=True, end=True, retain_s=-1, max_tokens=1)
    assert cache.pinned() == limit - 2
    pinned = cache.match("", [*others, 0])

    driver.say(2, tokens(2, block), start=True, retain_s=-1, max_tokens=1)
    for seed in (3, 4, 5):
        # also where it repeats what the first turn has asked for
        answer = driver.say(2, tokens(seed, 2 * block), max_tokens=1, retain_s=-1 if seed == 4 else 0.0)
        assert answer.reason is FinishReason.LENGTH
        assert cache.pinned() == limit
        assert cache.pinned_of("", others) == limit - 2
    assert cache.match("", [*others, 0]) == pinned

    refused = driver.say(6, tokens(6, block), start=True, retain_s=-1)
    assert str(refused.error).startswith(f"UNAVAILABLE: retain_memory full: {limit} of {limit} blocks are pinned")
    driver.end_all()
