"""A long chat: the twentieth turn computes no more than the second, and answers as soon."""

import statistics
import time

import pytest

from kvloom_client import Client
from support.server import assert_idle

QUESTIONS = [f"Please tell me one short fact about the number {number}." for number in range(1, 21)]
CLOSING = 2
"""The end token of an answer that was cut off, and the newline behind it."""


def chat(client: Client) -> list[float]:
    """Seconds to the first token of each turn of a chat of twenty."""
    waits = []
    with client.conversation() as talk:
        history, size = 0, 0
        for question in QUESTIONS:
            begun = time.perf_counter()
            stream = talk.stream(
                messages=[{"role": "user", "content": question}], max_tokens=12, temperature=0.0, return_usage=True
            )
            chunks = [next(stream)]
            waits.append(time.perf_counter() - begun)
            chunks += list(stream)
            usage = chunks[-1].usage
            assert usage is not None
            if not history:
                # the template's own system message is said once
                size = usage["prompt_tokens"]
            else:
                assert usage["prompt_tokens"] - usage["cached_tokens"] <= size + CLOSING + 1
                assert usage["prompt_tokens"] - history <= size + CLOSING
            history = usage["prompt_tokens"] + usage["generated_tokens"]
            assert usage["rerendered_tokens"] == 0
    return waits


def test_a_turn_computes_only_what_is_new(server, client):
    chat(client)
    assert_idle(server)


@pytest.mark.alone
@pytest.mark.full
def test_the_twentieth_turn_answers_as_soon_as_the_second_full(server, client):
    chats = [chat(client) for _ in range(5)]
    second, twentieth = (statistics.median(waits[turn] for waits in chats) for turn in (1, 19))
    print(f"TTFT of turn 2: {second * 1e3:.0f} ms, of turn 20: {twentieth * 1e3:.0f} ms")
    assert twentieth <= 1.5 * second
