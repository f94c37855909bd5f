"""Greedy answers of the real server, token by token, against those of the transformers library (fp32)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom_client import Client
from support.server import REFERENCE, assert_idle, canary

NEAR_TIE = 1e-3
"""Where the reference's two top logits lie closer than this, fp32 rounding may pick either."""


@pytest.fixture(autouse=True, scope="module")
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


def ask(client: Client, reference: dict, tokens: int) -> list[int]:
    prompt = {"messages": reference["messages"]} if "messages" in reference else {"text_input": reference["prompt"]}
    answer = client.generate(**prompt, temperature=0.0, max_tokens=tokens, ignore_eos=True, timeout=300)
    assert answer.num_input_tokens == len(reference["prompt_ids"])
    assert answer.finish_reason == "length"
    return list(answer.token_ids)


def check(reference: dict, ids: list[int]) -> str | None:
    """None if the ids are the reference's; a report if they part at a near-tie; fails otherwise."""
    for position, (ours, theirs) in enumerate(zip(ids, reference["ids"], strict=False)):
        if ours != theirs:
            margin = reference["margin"][position]
            report = f"{reference['name']}: token {position} is {ours}, not {theirs}; margin {margin}"
            assert margin < NEAR_TIE, report
            return report
    return None


def compare(client: Client, at_once: int, tokens: int) -> None:
    """Ask for the first ``tokens`` of every answer, ``at_once`` at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        answers = list(pool.map(lambda reference: ask(client, reference, tokens), REFERENCE))
    assert {len(ids) for ids in answers} == {tokens}
    ties = [tie for reference, ids in zip(REFERENCE, answers, strict=True) if (tie := check(reference, ids))]
    print(f"near-ties: {len(ties)} of {len(answers)}", *ties, sep="\n")


def test_alone(client):
    compare(client, at_once=1, tokens=12)


def test_all_together(client):
    compare(client, at_once=len(REFERENCE), tokens=64)


@pytest.mark.full
def test_alone_full(client):
    compare(client, at_once=1, tokens=64)
