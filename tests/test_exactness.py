"""Greedy answers of the real server, token by token, against those of the transformers library (fp32)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom_client import Client
from server import REFERENCE, assert_idle, canary

NEAR_TIE = 1e-3
"""Where the reference's two top logits lie closer than this, fp32 rounding may pick either."""


@pytest.fixture(autouse=True)
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


def ask(client: Client, reference: dict) -> list[int]:
    prompt = {"messages": reference["messages"]} if "messages" in reference else {"text_input": reference["prompt"]}
    answer = client.generate(**prompt, temperature=0.0, max_tokens=64, ignore_eos=True, timeout=300)
    assert answer.num_input_tokens == len(reference["prompt_ids"])
    assert answer.finish_reason == "length"
    return list(answer.token_ids)


def near_tie(reference: dict, ids: list[int]) -> str | None:
    """None if the ids are the reference's; a report if they part at a near-tie; fails otherwise."""
    assert len(ids) == len(reference["ids"])
    for position, (ours, theirs) in enumerate(zip(ids, reference["ids"], strict=True)):
        if ours != theirs:
            margin = reference["margin"][position]
            report = f"{reference['name']}: token {position} is {ours}, not {theirs}; margin {margin}"
            assert margin < NEAR_TIE, report
            return report
    return None


def report_ties(ties: list[str | None]) -> None:
    found = [tie for tie in ties if tie]
    print(f"near-ties: {len(found)} of {len(ties)}", *found, sep="\n")


@pytest.mark.parametrize("reference", REFERENCE, ids=lambda reference: reference["name"])
def test_alone(client, reference):
    report_ties([near_tie(reference, ask(client, reference))])


def test_all_together(client):
    with ThreadPoolExecutor(len(REFERENCE)) as pool:
        answers = list(pool.map(lambda reference: ask(client, reference), REFERENCE))
    report_ties([near_tie(reference, ids) for reference, ids in zip(REFERENCE, answers, strict=True)])
