"""Lossless means identical: tokens, text and log probabilities of an answer are the same however it is computed.

The expectation is each request alone on an engine of its own, without a prefix cache and with room for everything; and
for some, transformers' own generate.
"""

import itertools
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from kvloom.engine import build
from kvloom.request import FinishReason
from kvloom.scheduling.scheduler import Costs
from support.engine_driver import Answer, Driver
from support.tiny_models import EOS, make_tiny

BLOCK = 16
TOKEN_BYTES = 2 * 2 * 3 * 16 * 4
"""Keys and values of a token: two layers, three KV heads, heads of 16, fp32."""

ROOM = 400
"""Blocks that hold everything at once."""

TIGHT = {"kv_blocks": 60, "block_size": 4}
"""A pool for which 32 requests have to fight."""

_rng = random.Random(2)


def tokens(count: int) -> list[int]:
    return [_rng.randrange(3, 300) for _ in range(count)]


SHARED = tokens(3 * BLOCK)
"""What half of the prompts begin with."""


@dataclass(frozen=True)
class Case:
    prompt: list[int]
    fields: dict[str, object] = field(default_factory=dict)


CASES = {
    "one token": Case(tokens(1), {"max_tokens": 24}),
    "greedy": Case(tokens(33), {"logprobs": 5}),
    "whole blocks": Case(SHARED, {"logprobs": 5}),
    "the same again": Case(SHARED, {"logprobs": 5}),
    "long": Case([*SHARED, *tokens(90)], {"logprobs": 0}),
    "seeded": Case([*SHARED, *tokens(17)], {"temperature": 1.0, "seed": 7, "logprobs": 3, "max_tokens": 24}),
    "truncated": Case(tokens(15), {"temperature": 1.5, "seed": 2**64 - 1, "top_p": 0.9, "top_k": 40, "min_p": 0.01}),
    "penalized": Case(
        [*SHARED, *tokens(20)],
        {
            "temperature": 0.8,
            "seed": 3,
            "repetition_penalty": 1.3,
            "presence_penalty": 0.5,
            "frequency_penalty": 0.7,
            "max_tokens": 24,
        },
    ),
    "penalized greedy": Case([*SHARED, *tokens(1)], {"repetition_penalty": 1.5, "logprobs": 2, "max_tokens": 24}),
    "ends by itself": Case(
        tokens(40), {"temperature": 1.0, "seed": 4, "ignore_eos": False, "min_tokens": 9, "logit_bias": {EOS: 20.0}}
    ),
    "stop string": Case(tokens(16), {"temperature": 1.0, "seed": 8, "max_tokens": 40, "logprobs": 1}),
    "bad words": Case(tokens(63), {"bad_words": ("e", " ")}),
}
NEIGHBOURS = [Case(tokens(_rng.randrange(1, 60)), {"temperature": 1.0, "seed": seed}) for seed in range(10)] + [
    Case([*SHARED[: _rng.randrange(1, 48)], *tokens(_rng.randrange(9))], {"temperature": 1.0, "seed": seed})
    for seed in range(10)
]


def ask(driver: Driver, case: Case, **more: object) -> Answer:
    return driver.submit(case.prompt, **{"max_tokens": 16, **case.fields, **more})[1]


def run(driver: Driver, case: Case, **more: object) -> Answer:
    answer = ask(driver, case, **more)
    driver.run()
    return answer


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=9, kv_heads=3)


@pytest.fixture(scope="module")
def cases(model: Path) -> dict[str, Case]:
    """CASES, with a stop string that comes."""
    case = CASES["stop string"]
    whole = run(Driver(model), case).text
    stop = next(whole[i : i + 3] for i in range(8, len(whole)) if whole.index(whole[i : i + 3]) == i)
    return {**CASES, "stop string": Case(case.prompt, {**case.fields, "stop": (stop,)})}


@pytest.fixture(scope="module")
def expected(model: Path, cases: dict[str, Case]) -> dict[str, Answer]:
    return {name: run(Driver(model, prefix_cache=False, kv_blocks=ROOM), case) for name, case in cases.items()}


def assert_same(answer: Answer, expected: Answer) -> None:
    assert answer.ids == expected.ids
    assert answer.text == expected.text
    assert answer.reason is expected.reason
    for token, reference in zip(
        [token for delta in answer for token in delta.tokens],
        [token for delta in expected for token in delta.tokens],
        strict=True,
    ):
        assert [i for i, _ in token.top] == [i for i, _ in reference.top]
        assert [value for _, value in token.top] == pytest.approx([value for _, value in reference.top], abs=1e-4)
        assert token.logprob == pytest.approx(reference.logprob, abs=1e-4)


def test_the_cases_differ(expected):
    reasons = {name: answer.reason for name, answer in expected.items()}
    stopped = {name for name, reason in reasons.items() if reason is FinishReason.STOP}
    assert stopped == {"ends by itself", "stop string"}
    assert len({tuple(answer.ids) for answer in expected.values()}) == len(CASES) - 1
    assert 9 < len(expected["ends by itself"].ids) < 16
    assert len(expected["stop string"].text) >= 8


# However it is computed


def cold(driver: Driver, cases: dict[str, Case]) -> None:
    pass


def warm(driver: Driver, cases: dict[str, Case]) -> None:
    for case in cases.values():
        ask(driver, case)
    driver.run()


def partly_warm(driver: Driver, cases: dict[str, Case]) -> None:
    for case in cases.values():
        ask(driver, Case(case.prompt[: len(case.prompt) // 2 + 1]), max_tokens=1)
    driver.run()


def retained(driver: Driver, cases: dict[str, Case]) -> None:
    """The shared prefix is kept; whatever else was cached is gone."""
    run(driver, Case(SHARED), max_tokens=1, retain_s=-1)
    for start in range(6):
        run(driver, Case([3 + (start + i * (start + 7)) % 290 for i in range(230)]), max_tokens=1)


PREFIXES = {prepare.__name__: prepare for prepare in (cold, warm, partly_warm, retained)}


@dataclass(frozen=True)
class Way:
    """A way to compute the cases.

    Attributes:
        chunk: a step's token budget.
        prefix: one of PREFIXES.
        preempted: how blocks are given away, None: there is room for all.
        alone: one case after the other, else all of them and NEIGHBOURS at once.
        order: seed of their order and of when they come.
    """

    chunk: int = 4096
    prefix: str = "cold"
    preempted: str | None = None
    alone: bool = False
    order: int = 0


def check(way: Way, model: Path, cases: dict[str, Case], expected: dict[str, Answer]) -> None:
    room = {"kv_blocks": 64 if way.prefix == "retained" else ROOM, "block_size": BLOCK}
    swap = "64MiB" if way.preempted == "swap" else "0"
    pool = TIGHT if way.preempted else room
    retained = (pool["kv_blocks"] - 1) * pool["block_size"] * TOKEN_BYTES
    driver = Driver(model, max_batch_tokens=way.chunk, swap_memory=swap, retain_memory=f"{retained}B", **pool)
    PREFIXES[way.prefix](driver, cases)
    before = driver.engine.stats()
    answers = one_by_one(driver, cases) if way.alone else all_at_once(driver, cases, random.Random(way.order))
    after = driver.engine.stats()
    for name, answer in answers.items():
        assert_same(answer, expected[name])

    cached = {name: answer.usage.cached_tokens for name, answer in answers.items()}
    if way.prefix == "warm" and not way.preempted:
        assert all(cached[name] == (len(case.prompt) - 1) // BLOCK * BLOCK for name, case in cases.items())
    if way.prefix == "partly_warm" and not way.preempted:
        assert BLOCK * 4 <= cached["long"] < len(cases["long"].prompt) - BLOCK
    if way.prefix == "retained" and not way.preempted:
        assert all(cached[name] >= len(SHARED) for name in ("long", "seeded", "penalized", "penalized greedy"))
    preemptions = sum(answer.usage.preemptions for answer in answers.values())
    assert (preemptions > 0) == (way.preempted is not None)
    swaps, recomputes = after.swaps - before.swaps, after.recomputes - before.recomputes
    assert (swaps > 0) == (way.preempted == "swap")
    assert (recomputes > 0) == (way.preempted == "recompute")


def one_by_one(driver: Driver, cases: dict[str, Case]) -> dict[str, Answer]:
    return {name: run(driver, case) for name, case in cases.items()}


def all_at_once(driver: Driver, cases: dict[str, Case], rng: random.Random) -> dict[str, Answer]:
    answers: dict[str, Answer] = {}
    submissions: list[Callable[[], object]] = [
        # when blocks are short it is the cases that give theirs away
        partial(ask, driver, case, priority=1)
        for case in NEIGHBOURS
    ]
    submissions += [
        lambda name=name, case=case: answers.update({name: ask(driver, case)}) for name, case in cases.items()
    ]
    assert len(submissions) == 32
    rng.shuffle(submissions)
    for submit in submissions:
        submit()
        for _ in range(rng.choice([0, 0, 0, 1, 4])):
            driver.engine.step()
    driver.run()
    return answers


SOME = [
    Way(1, "partly_warm", alone=True),
    Way(63),
    Way(64, "warm", alone=True),
    Way(65, "retained"),
    Way(prefix="warm"),
    Way(preempted="recompute"),
    Way(preempted="swap"),
    Way(63, "retained", "swap", order=1),
    Way(64, "partly_warm", "recompute", order=2),
    Way(65, "warm", "swap", order=3),
]
ALL = [
    Way(chunk, prefix, preempted, alone, order)
    for chunk, prefix, preempted, alone, order in itertools.product(
        (1, 63, 64, 65, 4096), PREFIXES, (None, "recompute", "swap"), (False, True), range(3)
    )
    # one that runs alone never gives its blocks away, and only one runs where a step is one token
    if not (preempted and (alone or chunk == 1)) and not (order and (alone or chunk == 1))
]


@pytest.fixture(autouse=True)
def swapping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copying a block may take longer than computing a tiny model's few tokens again."""
    monkeypatch.setattr(build, "measure_costs", lambda *_: Costs(copy_block_s=0.0, compute_token_s=1.0))


@pytest.mark.parametrize("way", SOME, ids=str)
def test_answers_are_the_same(way, model, cases, expected):
    check(way, model, cases, expected)


@pytest.mark.full
@pytest.mark.parametrize("way", ALL, ids=str)
def test_answers_are_the_same_full(way, model, cases, expected):
    check(way, model, cases, expected)


@pytest.mark.parametrize("block_hash", ["constant", "mod7"])
def test_answers_are_the_same_when_hashes_collide(block_hash, model, cases, expected):
    driver = Driver(model, kv_blocks=ROOM, test_block_hash=block_hash)
    warm(driver, cases)
    for name, answer in all_at_once(driver, cases, random.Random(0)).items():
        assert_same(answer, expected[name])


# What others compute


@pytest.mark.parametrize("name", ["one token", "greedy", "whole blocks", "long", "penalized greedy"])
@torch.inference_mode()
def test_transformers_generates_the_same(name, model, cases, expected):
    theirs = LlamaForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    theirs.generation_config.eos_token_id = None
    prompt, fields = cases[name].prompt, cases[name].fields
    [ids] = theirs.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        pad_token_id=0,
        do_sample=False,
        max_new_tokens=fields.get("max_tokens", 16),
        repetition_penalty=fields.get("repetition_penalty", 1.0),
    ).tolist()
    assert ids[len(prompt) :] == expected[name].ids
    if "logprobs" in fields:
        logprobs = theirs(torch.tensor([ids[:-1]])).logits[0, len(prompt) - 1 :].log_softmax(-1)
        own = [token.logprob for delta in expected[name] for token in delta.tokens]
        assert logprobs[range(len(own)), expected[name].ids].tolist() == pytest.approx(own, abs=1e-4)
