"""The engine on a tiny random model: answers do not depend on how they were computed, and every one ends once."""

import random
import threading
from unittest import mock

import pytest

from kvloom.engine.engine import Engine
from kvloom.engine.thread import EngineThread
from kvloom.errors import Internal, InvalidArgument, Unavailable
from kvloom.request import FinishReason
from support.engine_driver import Answer, Driver
from support.tiny_models import make_tiny
from support.waiting import submit


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=9, kv_heads=3)


@pytest.fixture(scope="module")
def prompts():
    rng = random.Random(5)
    return [[rng.randrange(3, 300) for _ in range(length)] for length in (1, 15, 16, 17, 40, 63, 90, 120)]


@pytest.fixture(scope="module")
def expected(model, prompts):
    """Each prompt alone, with room for everything in one step."""
    driver = Driver(model, max_batch_tokens=2048)
    return [
        (driver.answer(prompt, max_tokens=40).ids, driver.answer(prompt, max_tokens=40, temperature=1.0, seed=9).ids)
        for prompt in prompts
    ]


def test_an_answer_whose_blocks_are_lost_ends_once_and_the_engine_goes_on(model, prompts, expected):
    """A broken invariant: the end of an answer is what fails."""
    driver = Driver(model)
    broken, answer = driver.submit(prompts[0], max_tokens=5)
    _, other = driver.submit(prompts[0], max_tokens=10)
    driver.engine.step()
    driver.engine._cache.release(list(broken.blocks))
    with pytest.raises(AssertionError, match="a block was released that is in no block table"):
        for _ in range(5):
            driver.engine.step()
    assert str(answer.error) == "INTERNAL: the answer could not be ended"
    driver.engine.recover(Internal("the engine failed"))
    assert str(other.error) == "INTERNAL: the engine failed"
    assert driver.engine.stats().finished == {"error": 2}
    assert driver.answer(prompts[2], max_tokens=40).ids == expected[2][0]


def test_who_could_not_be_taken_out_is_taken_out_afterwards(model, prompts, expected):
    driver = Driver(model)
    _, answer = driver.submit(prompts[1], max_tokens=5)
    others = [driver.submit(prompts[2], max_tokens=40)[1] for _ in range(2)]
    with mock.patch.object(driver.engine._scheduler, "remove", side_effect=ValueError("a fault")):
        with pytest.raises(ValueError, match="a fault"):
            driver.run()
        assert str(answer.error) == "INTERNAL: the answer could not be ended"
        driver.engine.fail_all(Internal("the engine failed"))
        assert [str(other.error) for other in others] == ["INTERNAL: the answer could not be ended"] * 2
    driver.engine.recover(Internal("the engine failed"))
    assert len(answer) == 5
    assert driver.answer(prompts[2], max_tokens=40).ids == expected[2][0]


@pytest.mark.parametrize(
    "settings",
    [
        {"max_batch_tokens": 1},
        {"max_batch_tokens": 8},
        {"max_batch_tokens": 63},
        {"max_batch_tokens": 64},
        {"max_batch_tokens": 65},
        {"block_size": 8, "kv_blocks": 200},
        {"kv_blocks": 17},
        {"kv_blocks": 12, "max_batch_tokens": 64},
        {"max_running": 1},
    ],
    ids=str,
)
def test_answers_are_the_same_however_they_are_computed(model, prompts, expected, settings):
    driver = Driver(model, **settings)
    greedy = [driver.submit(prompt, max_tokens=40)[1] for prompt in prompts]
    driver.engine.step()
    seeded = [driver.submit(prompt, max_tokens=40, temperature=1.0, seed=9)[1] for prompt in reversed(prompts)]
    driver.run()
    assert [answer.ids for answer in greedy] == [ids for ids, _ in expected]
    assert [answer.ids for answer in reversed(seeded)] == [ids for _, ids in expected]
    assert all(answer.reason is FinishReason.LENGTH for answer in greedy + seeded)
    if settings.get("kv_blocks", 64) < 20:
        assert driver.engine.stats().swaps + driver.engine.stats().recomputes > 0
    stats = driver.engine.stats()
    assert stats.prompt_tokens == 2 * sum(map(len, prompts))
    assert stats.generated_tokens == 2 * 40 * len(prompts)


def test_text_is_the_decode_of_the_ids(model, prompts):
    driver = Driver(model)
    for seed in range(20):
        answer = driver.answer(prompts[4], max_tokens=50, temperature=1.5, seed=seed)
        assert answer.text == driver.tokenizer.decode(answer.ids)


def test_max_tokens_and_context_end_an_answer(model):
    driver = Driver(model, context_length=32)
    assert len(driver.answer([5, 6, 7], max_tokens=1).ids) == 1
    answer = driver.answer([5, 6, 7], max_tokens=10**9)
    assert (len(answer.ids), answer.reason) == (29, FinishReason.LENGTH)
    assert len(driver.answer([5] * 31).ids) == 1


def test_end_token_ends_an_answer(model, prompts):
    driver = Driver(model)
    greedy = driver.answer(prompts[3], max_tokens=20)
    end = greedy.ids[10]
    driver.tokenizer.eos_ids = frozenset({end})
    answer = driver.answer(prompts[3], max_tokens=20, ignore_eos=False)
    assert answer.ids == greedy.ids[: greedy.ids.index(end) + 1]
    assert answer.reason is FinishReason.STOP
    assert answer.text == driver.tokenizer.decode(answer.ids[:-1])
    assert driver.answer(prompts[3], max_tokens=20).ids == greedy.ids


def test_stop_string_ends_an_answer(model, prompts):
    driver = Driver(model)
    whole = driver.answer(prompts[3], max_tokens=40).text
    stop = whole[15:18]
    answer = driver.answer(prompts[3], max_tokens=40, stop=(stop,))
    assert answer.text == whole[: whole.index(stop)]
    assert answer.reason is FinishReason.STOP
    kept = driver.answer(prompts[3], max_tokens=40, stop=(stop,), include_stop_str_in_output=True)
    assert kept.text == whole[: whole.index(stop) + len(stop)]


def test_cancel_at_every_stage(model, prompts):
    driver = Driver(model, max_running=2, max_batch_tokens=32)
    running, first = driver.submit(prompts[1], max_tokens=100)
    prefilling, second = driver.submit(prompts[7], max_tokens=100)
    waiting, third = driver.submit(prompts[2], max_tokens=100)
    driver.engine.step()
    for sequence in (waiting, prefilling, running, running):
        driver.engine.cancel(sequence)
    assert [answer.reason for answer in (first, second, third)] == [FinishReason.CANCELLED] * 3
    assert len(first.ids) == 1
    driver.assert_idle()


def test_cancel_releases_held_back_text(model, prompts):
    driver = Driver(model)
    whole = driver.answer(prompts[3], max_tokens=5)
    sequence, answer = driver.submit(prompts[3], max_tokens=100, stop=(whole.text + "never",))
    for _ in range(5):
        driver.engine.step()
    assert answer.text == "", "the text so far may yet become the stop string"
    driver.engine.cancel(sequence)
    assert answer.text == whole.text
    assert answer.ids == whole.ids


def test_sequence_that_outgrows_the_pool_ends_with_length(model, prompts):
    driver = Driver(model, kv_blocks=3)
    alone = driver.answer(prompts[1], max_tokens=200)
    assert alone.reason is FinishReason.LENGTH
    # 3 blocks of 16 tokens, and one more token whose KV needs no room
    assert len(prompts[1]) + len(alone.ids) == 3 * 16 + 1
    assert alone[-1].tokens, "the last response carries a token"
    answers = [driver.submit(prompts[1], max_tokens=200)[1] for _ in range(4)]
    driver.run()
    assert [answer.ids for answer in answers] == [alone.ids] * 4


def test_what_can_never_fit_is_refused(model):
    driver = Driver(model, kv_blocks=3, context_length=200)
    with pytest.raises(InvalidArgument, match=r"prompt: has 200 tokens; context_length 200 takes at most 199"):
        driver.submit([5] * 200)
    with pytest.raises(InvalidArgument, match="the whole KV cache holds 48"):
        driver.submit([5] * 49)
    with pytest.raises(InvalidArgument, match="empty"):
        driver.submit([])
    with pytest.raises(InvalidArgument, match="token 100000 has no embedding"):
        driver.submit([5, 100_000])
    whole_pool = driver.answer([5] * 48, max_tokens=9)
    assert (len(whole_pool.ids), whole_pool.reason) == (1, FinishReason.LENGTH)


def test_queue_full_is_refused_at_once(model, prompts):
    driver = Driver(model, max_running=1, max_queue=2)
    # one runs in the next step, two wait for it
    accepted = [driver.submit(prompts[0], max_tokens=4)[1] for _ in range(3)]
    refused = driver.submit(prompts[0], max_tokens=4)[1]
    assert isinstance(refused.error, Unavailable)
    assert str(refused.error).startswith("UNAVAILABLE: queue full")
    driver.run()
    assert [answer.reason for answer in accepted] == [FinishReason.LENGTH] * 3


def test_failing_step_ends_its_requests_only(model, prompts, monkeypatch):
    driver = Driver(model, max_running=1)
    failing = driver.submit(prompts[0], max_tokens=4)[1]
    later = driver.submit(prompts[1], max_tokens=4)[1]
    runner = driver.engine._runner
    monkeypatch.setattr(runner, "run", None)
    driver.engine.step()
    monkeypatch.undo()
    assert isinstance(failing.error, Internal)
    driver.run()
    assert later.reason is FinishReason.LENGTH


def test_one_answers_text_failing_ends_that_answer_only(model, prompts):
    driver = Driver(model)
    expected = driver.answer(prompts[1], max_tokens=4).ids
    broken, failing = driver.submit(prompts[0], max_tokens=4)
    healthy = driver.submit(prompts[1], max_tokens=4)[1]
    driver.engine._answers[broken].text._detokenizer = None
    driver.run()
    assert isinstance(failing.error, Internal)
    assert healthy.ids == expected


def test_fail_after_tokens_hits_only_its_requests(model, prompts):
    driver = Driver(model, test_fail_after_tokens=5)
    failing = driver.submit(prompts[0], request_id="test-fail-1", max_tokens=9)[1]
    healthy = driver.submit(prompts[0], request_id="other", max_tokens=9)[1]
    driver.run()
    assert len(failing.ids) == 5
    assert str(failing.error).startswith("INTERNAL: ")
    assert len(healthy.ids) == 9


@pytest.fixture
def engine(model) -> Engine:
    return Driver(model).engine


def test_loop_serves_many_threads(engine, prompts, expected):
    engine_thread = EngineThread(lambda: engine)
    results: dict[int, Answer] = {}

    def client(number):
        answer, done = submit(engine_thread, prompts[number % 8], max_tokens=40, temperature=0.0)
        assert done.wait(60)
        results[number] = answer

    threads = [threading.Thread(target=client, args=(number,)) for number in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    engine_thread.stop()
    assert {number: answer.ids for number, answer in results.items()} == {n: expected[n % 8][0] for n in range(24)}


def test_loop_survives_a_failing_scheduler(engine, prompts, expected, monkeypatch):
    engine_thread = EngineThread(lambda: engine)
    monkeypatch.setattr(engine._scheduler, "plan", lambda: 1 / 0)
    answer, done = submit(engine_thread, prompts[4], max_tokens=40, temperature=0.0)
    assert done.wait(10)
    assert isinstance(answer.error, Internal)
    monkeypatch.undo()
    answer, done = submit(engine_thread, prompts[4], max_tokens=40, temperature=0.0)
    assert done.wait(10)
    assert answer.ids == expected[4][0]
    engine_thread.stop()


def test_stopping_the_loop_ends_every_answer(engine, prompts):
    engine_thread = EngineThread(lambda: engine)
    answers = [submit(engine_thread, prompts[4], max_tokens=10_000)[0] for _ in range(5)]
    engine_thread.stop()
    assert all(isinstance(answer.error, Unavailable) for answer in answers)
    assert engine_thread.stats.blocks_used == 0
