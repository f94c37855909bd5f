"""The clients' answers from the real server: over HTTP the same as over gRPC."""

import pytest

from kvloom_client import AnswerTimeout, HttpClient, InvalidArgument, ServerError
from kvloom_client.answer import join
from support.server import REFERENCE, assert_idle, canary

EXPECTED = REFERENCE[0]
PROMPT = EXPECTED["prompt"]
FIRST_16 = tuple(EXPECTED["ids"][:16])
ENDLESS = {"text_input": PROMPT, "max_tokens": 4000, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def http(server):
    with HttpClient(server.ports.address("http")) as client:
        yield client


def test_http_gives_the_same_answer_as_grpc(server, client, http):
    request = {"text_input": PROMPT, "max_tokens": 16, "temperature": 0.0}
    answer = http.generate(**request)
    assert answer.token_ids == FIRST_16
    assert answer == client.generate(**request) == client.generate(model="generate", **request)
    chunks = list(http.stream(**request))
    assert len(chunks) > 1
    assert join(chunks) == answer
    one = http.generate(input_ids=EXPECTED["prompt_ids"], max_tokens=1, temperature=0.0)
    assert one.token_ids == FIRST_16[:1]


def test_further_outputs_are_the_same_over_http_and_grpc(client, http):
    request = {"text_input": PROMPT, "max_tokens": 4, "temperature": 0.0, "logprobs": 2}
    request |= {"return_logprobs": True, "return_cumulative_logprob": True, "return_usage": True}
    answers = [client.generate(**request), join(list(client.stream(**request))), join(list(http.stream(**request)))]
    for answer in answers:
        assert [entry["id"] for entry in answer.logprobs] == list(answer.token_ids)
        assert [len(entry["top"]) for entry in answer.logprobs] == [2] * 4
        total = sum(entry["logprob"] for entry in answer.logprobs)
        assert answer.cumulative_logprob == pytest.approx(total, abs=1e-3)
        assert (answer.usage["prompt_tokens"], answer.usage["generated_tokens"]) == (answer.num_input_tokens, 4)
    assert answers[0].logprobs == answers[1].logprobs == answers[2].logprobs


def test_real_errors_are_typed(server, http):
    with pytest.raises(InvalidArgument, match="^INVALID_ARG: temperature"):
        http.generate(text_input=PROMPT, temperature=-1.0)
    with pytest.raises(InvalidArgument, match="no_such_key"):
        list(http.stream(text_input=PROMPT, sampling_parameters={"no_such_key": 1}))
    with pytest.raises(ServerError, match="no_such_model"):
        http.generate(text_input=PROMPT, model="no_such_model")
    canary(server)


def test_a_cancelled_stream_is_no_more_work(server, http):
    stream = http.stream(**ENDLESS)
    next(stream)
    stream.cancel()
    assert list(stream) == []
    with pytest.raises(AnswerTimeout):
        list(http.stream(timeout=0.5, **ENDLESS))
    assert_idle(server)


def test_a_deadline_ends_the_answer(server, http):
    answer = http.generate(deadline_ms=500, **ENDLESS)
    assert answer.finish_reason == "deadline"
    assert answer.token_ids == tuple(EXPECTED["ids"][: len(answer.token_ids)]) or len(answer.token_ids) > 32
    assert_idle(server)


def test_control(client, server):
    assert client.control("ping", timeout=30)["ok"]
    assert client.control("flush", timeout=30)["ok"]
    with pytest.raises(InvalidArgument):
        client.control("no_such_op", timeout=30)
    canary(server)
