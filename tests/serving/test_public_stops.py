"""Faults that users of such servers reported, against the real server: the texts of tokens (K05, K10, K14)."""

import pytest

from kvloom_client import Client
from support.server import assert_idle, canary

BOTH = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


def streamed(client: Client, **request: object) -> tuple[str, list[int], str]:
    """Text, token ids and finish reason of a streamed answer."""
    chunks = list(client.stream(**request, timeout=120))
    return "".join(chunk.text for chunk in chunks), [t for c in chunks for t in c.token_ids], chunks[-1].finish_reason


def test_k14_the_text_of_a_special_token_stops(client, _healthy):
    start = 1
    # <|im_start|> comes whenever a space may, and is no end token
    request = {**BOTH, "text_input": "The capital city of France is", "logit_bias": {str(start): 100.0}}
    for stop in ("<|im_start|>", ["never", "<|im_start|>"], "<|im_start|><|im_start|>"):
        spelled = stop if isinstance(stop, str) else stop[1]
        text, ids, reason = streamed(client, **request, stop=stop)
        assert (text, ids, reason) == ("", [start] * spelled.count("<|im_start|>"), "stop")
        whole = client.generate(**request, stop=stop)
        assert (whole.text, list(whole.token_ids), whole.finish_reason) == (text, ids, reason)
        kept = client.generate(**request, stop=stop, include_stop_str_in_output=True)
        assert kept.text == spelled
    # in the middle, with text around
    end = 2
    chat = {**BOTH, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = client.generate(**chat)
    assert end in answer.token_ids
    before = list(answer.token_ids)[: answer.token_ids.index(end) + 1]
    text, ids, reason = streamed(client, **chat, stop="<|im_end|>")
    assert (ids, reason) == (before, "stop")
    assert answer.text.startswith(text)
    last = text[-3:]
    assert streamed(client, **chat, stop=last + "<|im_end|>") == (text.removesuffix(last), before, "stop")
