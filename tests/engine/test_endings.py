"""However answers end, and whenever: one final each, and nothing of them is left. Failing steps touch nobody else."""

import gc
import random
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from kvloom.engine import build
from kvloom.engine.thread import EngineThread
from kvloom.errors import Internal, Unavailable
from kvloom.executor import runner
from kvloom.kv.transfer import copy_blocks
from kvloom.request import FinishReason, Sequence, Slice
from kvloom.scheduling.scheduler import Costs
from support.engine_driver import Answer, Driver
from support.tiny_models import EOS, make_tiny
from support.waiting import submit


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=9, kv_heads=3)


@pytest.fixture(autouse=True)
def swapping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a block may take longer than computing a tiny model's few tokens again."""
    monkeypatch.setattr(build, "measure_costs", lambda *_: Costs(copy_block_s=0.0, compute_token_s=1.0))


# Mixed endings

SHARED = [random.Random(1).randrange(3, 300) for _ in range(40)]
ENDINGS = ["length", "stop", "end token", "error", "cancel", "deadline", "never begun"]


class Crowd:
    """Submits requests at random and watches each one's end."""

    def __init__(self, driver: Driver, seed: int):
        self.driver = driver
        self.rng = random.Random(seed)
        self.ended: Counter[str] = Counter()
        self._open: list[tuple[str, Sequence, Answer]] = []

    def live(self, requests: int) -> None:
        """So many requests, a few at a time, until all have ended."""
        submitted = 0
        while submitted < requests or self._open:
            for _ in range(self.rng.choice([0, 0, 1, 3]) if len(self._open) < 24 else 0):
                if submitted < requests:
                    self._submit(ENDINGS[submitted % len(ENDINGS)])
                    submitted += 1
            self.driver.engine.step()
            self._cancel_some()
            self.driver.engine.check_invariants()
            self._count()
        self.driver.assert_idle()
        self.driver.engine.observations.drain()

    def _submit(self, ending: str) -> None:
        rng = self.rng
        prompt = SHARED[: rng.randrange(40)] + [rng.randrange(3, 300) for _ in range(rng.randrange(1, 20))]
        now = time.monotonic()
        more = {
            "stop": {"stop": tuple("abcdefghijklmnoprstu 123,."), "max_tokens": 60},
            "end token": {"ignore_eos": False, "logit_bias": {EOS: 60.0}, "min_tokens": rng.randrange(8)},
            "error": {"request_id": "test-fail"},
            "cancel": {"max_tokens": 200},
            "deadline": {"deadline": now + rng.uniform(0, 0.2), "max_tokens": 200},
            # came so long ago that its wait is over, unless a step begins it at once
            "never begun": {"arrival": now - 100, "priority": -100},
        }.get(ending, {})
        sequence, answer = self.driver.submit(
            prompt,
            **{
                "arrival": now,
                "max_tokens": rng.randrange(8, 24),
                "temperature": rng.choice([0.0, 1.0]),
                "seed": rng.randrange(3),
                "priority": rng.randrange(2),
                "cache_salt": rng.choice(["", "", "x"]),
                "retain_s": rng.choice([0.0, 0.0, 0.01]),
                **more,
            },
        )
        self._open.append((ending, sequence, answer))

    def _cancel_some(self) -> None:
        for ending, sequence, _ in self._open:
            if ending == "cancel" and self.rng.random() < 0.1:
                self.driver.engine.cancel(sequence)

    def _count(self) -> None:
        for ending, sequence, answer in self._open:
            if not (answer and answer[-1].final):
                continue
            answer.assert_one_final()
            assert not sequence.blocks
            assert not sequence.host_blocks
            error = answer.error
            self.ended[f"{ending}: {type(error).__name__ if error else answer.reason}"] += 1
            assert error is None or (ending, type(error)) in {("error", Internal), ("never begun", Unavailable)}
        self._open = [entry for entry in self._open if not (entry[2] and entry[2][-1].final)]


def crowded(model: Path) -> Driver:
    return Driver(
        model,
        kv_blocks=48,
        block_size=4,
        max_batch_tokens=128,
        swap_memory="64MiB",
        retain_memory="100KB",
        queue_timeout_ms=60_000,
        test_fail_after_tokens=5,
    )


EXPECTED = {
    "length: length",
    "stop: stop",
    "end token: stop",
    "error: Internal",
    "cancel: cancelled",
    "deadline: deadline",
    "never begun: Unavailable",
}


@pytest.mark.slow
def test_answers_that_end_in_every_way_leave_nothing(model):
    driver = crowded(model)
    crowd = Crowd(driver, seed=1)
    crowd.live(300)
    assert crowd.ended.total() == 300
    assert crowd.ended.keys() >= EXPECTED
    stats = driver.engine.stats()
    assert stats.swaps > 0
    assert stats.blocks_swapped == 0
    assert sum(stats.finished.values()) == 300


@pytest.mark.full
def test_answers_that_end_in_every_way_leave_nothing_full(model):
    driver = crowded(model)
    crowd = Crowd(driver, seed=2)
    process = psutil.Process()
    crowd.live(1000)
    gc.collect()
    warm = process.memory_info().rss
    crowd.live(2000)
    gc.collect()
    assert crowd.ended.total() == 3000
    assert crowd.ended.keys() >= EXPECTED
    assert process.memory_info().rss < 1.05 * warm


# Failing steps


def fail_step(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[Sequence]:
    """Let the model fail in the middle of the next step, with garbage in the cache; returns whose step it was."""
    runner = driver.engine._runner
    run = runner.run
    hit: list[Sequence] = []

    def note(slices: list[Slice]) -> object:
        hit.extend(piece.sequence for piece in slices)
        return run(slices)

    def fail(batch, caches):
        for keys, values in caches:
            block_size = keys.shape[2]
            for cache in (keys, values):
                cache[batch.slots // block_size, :, batch.slots % block_size] = 1e3
        raise RuntimeError("test")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "run", note)
        patch.setattr(runner, "_decodes", None)  # a replay has no middle to fail in
        patch.setattr(runner._decoder, "forward", fail)
        driver.engine.step()
    driver.engine.check_invariants()
    return hit


PROMPTS = [SHARED[:24] + [100 + number] * (number % 5 + 1) * 7 for number in range(10)]


@pytest.fixture(scope="module")
def expected(model: Path) -> list[list[int]]:
    return [Driver(model, prefix_cache=False).answer(prompt, max_tokens=20).ids for prompt in PROMPTS]


# with the least budget a step's sequences are few and their prompts come in chunks; in the small pool some wait swapped
@pytest.mark.parametrize("step", [0, 1, 2, 5, 13])
@pytest.mark.parametrize(
    "settings", [{"max_batch_tokens": 8}, {"kv_blocks": 16, "block_size": 8}, {"max_running": 3}], ids=str
)
def test_a_failing_step_ends_its_requests_only(model, expected, monkeypatch, settings, step):
    driver = Driver(model, **{"max_batch_tokens": 40, "swap_memory": "64MiB", **settings})
    submitted = [driver.submit(prompt, max_tokens=20) for prompt in PROMPTS]
    for _ in range(step):
        driver.engine.step()
    before = [list(answer) for _, answer in submitted]
    hit = fail_step(driver, monkeypatch)
    assert hit
    driver.run()
    for (sequence, answer), earlier, ids in zip(submitted, before, expected, strict=True):
        if sequence in hit:
            assert isinstance(answer.error, Internal)
            assert "INTERNAL: the step failed" in str(answer.error)
            assert answer[:-1] == earlier
            assert answer.ids == ids[: len(answer.ids)]
        else:
            assert answer.reason is FinishReason.LENGTH
            assert answer.ids == ids
    assert len(hit) < len(submitted)
    again = [driver.submit(prompt, max_tokens=20)[1] for prompt in PROMPTS]
    driver.run()
    assert [answer.ids for answer in again] == expected


@pytest.mark.parametrize("direction", ["out", "in"])
def test_a_failing_copy_ends_its_steps_requests_only(model, expected, monkeypatch, direction):
    driver = Driver(model, kv_blocks=16, block_size=8, swap_memory="64MiB")
    submitted = [driver.submit(prompt, max_tokens=20) for prompt in PROMPTS]
    failed = []

    def copy(source, target, moves):
        if moves and not failed and (target is driver.engine._runner._host) == (direction == "out"):
            failed.append(moves)
            raise RuntimeError("test")
        copy_blocks(source, target, moves)

    monkeypatch.setattr(runner, "copy_blocks", copy)
    driver.run()
    assert failed
    ended = [answer.error for _, answer in submitted]
    assert 0 < sum(isinstance(error, Internal) for error in ended) < len(ended)
    for error, (_, answer), ids in zip(ended, submitted, expected, strict=True):
        assert answer.ids == (ids if error is None else ids[: len(answer.ids)])
    again = [driver.submit(prompt, max_tokens=20)[1] for prompt in PROMPTS]
    driver.run()
    assert [answer.ids for answer in again] == expected


def test_what_a_failed_plan_promised_is_not_found_later(model, expected, monkeypatch):
    engine = Driver(model).engine
    plan = engine._scheduler.plan

    def fail_once():
        monkeypatch.undo()
        plan()
        raise RuntimeError("test")

    engine_thread = EngineThread(lambda: engine)
    monkeypatch.setattr(engine._scheduler, "plan", fail_once)
    answers = []
    for _ in range(2):
        answer, done = submit(engine_thread, PROMPTS[4], max_tokens=20, temperature=0.0)
        assert done.wait(60)
        answers.append(answer)
    engine_thread.stop()
    assert isinstance(answers[0].error, Internal)
    assert answers[1].ids == expected[4]


# Pinned prompts


def test_a_pinned_prompt_can_be_pinned_again(model):
    driver = Driver(model, retain_memory="100KB")
    limit = driver.engine._cache.retain_limit
    prompt = [random.Random(2).randrange(3, 300) for _ in range(16 * limit)]
    for _ in range(2):
        assert driver.answer(prompt, max_tokens=1, retain_s=-1).reason is FinishReason.LENGTH
        assert driver.engine._cache.pinned() == limit
    for retain_s in (-1, 60):
        longer = driver.answer([*prompt[:-16], *SHARED[:16]], max_tokens=1, retain_s=retain_s)
        assert isinstance(longer.error, Unavailable)
        assert str(longer.error).startswith("UNAVAILABLE: retain_memory full")
    assert driver.engine.flush() > 0
    assert driver.answer(SHARED[:32], max_tokens=1, retain_s=-1).reason is FinishReason.LENGTH
    assert driver.engine._cache.pinned() == 2
