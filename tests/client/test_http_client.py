"""The HTTP client's side of the protocol, against a scripted server."""

import json
import threading
import time

import pytest

from kvloom_client import (
    AnswerTimeout,
    Client,
    ConnectionFailed,
    HttpClient,
    IncompleteAnswer,
    Internal,
    InvalidArgument,
    ServerError,
    Unavailable,
)
from kvloom_client.answer import join
from support.sse_server import Exchange, SseServer

HELLO = "Größe 日本 🙂\u2028."


def hello(exchange: Exchange) -> None:
    exchange.head()
    exchange.event(text_output=HELLO, finish_reason="", token_ids=[5, 6], num_input_tokens=3)
    exchange.event(text_output="!", finish_reason="stop", token_ids=7, num_input_tokens=3)
    exchange.end()


def refuse(text: str, status: int = 400):
    """As Triton refuses a request itself."""

    def script(exchange: Exchange) -> None:
        exchange.head(status, "application/json")
        exchange.send(json.dumps({"error": text}).encode())
        exchange.end()

    return script


def model_refuses(text: str):
    """As Triton passes on a model's error that comes before any chunk of a stream."""

    def script(exchange: Exchange) -> None:
        exchange.head(400)
        exchange.event(error=text)
        exchange.end()

    return script


def first_then(then):
    """A script that answers with one chunk and goes on with ``then``."""

    def script(exchange: Exchange) -> None:
        exchange.head()
        exchange.event(text_output="a", finish_reason="", token_ids=1)
        then(exchange)

    return script


# answers


def test_a_stream_and_its_chunks():
    with SseServer(hello) as server, HttpClient(server.url) as client:
        with client.stream(text_input="x", request_id="r1", max_tokens=3) as stream:
            chunks = list(stream)
        assert [(chunk.text, chunk.token_ids, chunk.finish_reason) for chunk in chunks] == [
            (HELLO, (5, 6), None),
            ("!", (7,), "stop"),
        ]
        answer = join(chunks)
        assert (answer.num_input_tokens, answer.num_output_tokens) == (3, 3)
        assert not stream.cancelled
        [exchange] = server.exchanges
        assert exchange.path == "/v2/models/generate/generate_stream"
        assert exchange.body == {
            "id": "r1",
            "text_input": "x",
            "stream": True,
            "exclude_input_in_output": True,
            "return_finish_reason": True,
            "return_num_input_tokens": True,
            "return_token_ids": True,
            "sampling_parameters": '{"max_tokens": 3}',
        }


def test_characters_split_over_reads():
    def script(exchange):
        exchange.head()
        event = {"text_output": HELLO, "finish_reason": "stop"}
        for byte in f"data: {json.dumps(event, ensure_ascii=False)}\n\n".encode():
            exchange.send(bytes([byte]))
        exchange.end()

    with SseServer(script) as server, HttpClient(server.url) as client:
        assert [chunk.text for chunk in client.stream(text_input="x")] == [HELLO]


def test_every_argument_has_its_field():
    def script(exchange):
        exchange.head(200, "application/json")
        outputs = {
            "text_output": "a",
            "finish_reason": "length",
            "token_ids": 1,
            "logprobs": '[{"id": 1, "text": "a", "logprob": -0.5, "top": []}]',
            "cumulative_logprob": -0.5,
            "usage": '{"prompt_tokens": 1}',
        }
        exchange.send(json.dumps(outputs).encode())
        exchange.end()

    with SseServer(script) as server, HttpClient(server.url) as client:
        answer = client.generate(
            messages=[{"role": "user", "content": "日本"}],
            return_logprobs=True,
            return_cumulative_logprob=True,
            return_usage=True,
            stream_interval_ms=100,
            deadline_ms=5000,
            priority=-1,
            cache_salt="s",
            kv={"dtype": "int8"},
            sampling_parameters={"min_p": 0.1, "n": 2},
            n=1,
            bad_words=["x"],
        )
        assert (answer.usage, answer.cumulative_logprob) == ({"prompt_tokens": 1}, -0.5)
        assert answer.logprobs == [{"id": 1, "text": "a", "logprob": -0.5, "top": []}]
        [exchange] = server.exchanges
    assert exchange.path == "/v2/models/generate/generate"
    sent = exchange.body
    assert json.loads(sent["messages"]) == [{"role": "user", "content": "日本"}]
    assert json.loads(sent["kv"]) == {"dtype": "int8"}
    assert json.loads(sent["sampling_parameters"]) == {"min_p": 0.1, "n": 1, "bad_words": ["x"]}
    names = ("stream", "stream_interval_ms", "deadline_ms", "priority", "cache_salt", "return_logprobs", "return_usage")
    assert [sent[name] for name in names] == [False, 100, 5000, -1, "s", True, True]


@pytest.mark.parametrize(
    "request_",
    [
        {},
        {"text_input": "\ud83d"},
        {"messages": [{"role": "user", "content": "\ud83d"}]},
        {"text_input": "a", "deadline_ms": 2**31},
        {"text_input": "a", "priority": 1.5},
        {"input_ids": [1, 4294967301]},
        {"text_input": "a", "stop": b"bytes"},
    ],
    ids=["no prompt", "half a pair", "half a pair in messages", "too large", "not an integer", "wraps", "not JSON"],
)
def test_what_cannot_be_sent_is_refused_at_once(request_):
    with HttpClient("127.0.0.1:1") as client, pytest.raises(InvalidArgument, match="^INVALID_ARG: "):
        client.stream(**request_)


# errors


def test_an_error_before_the_answer():
    scripts = [
        model_refuses("INVALID_ARG: top_p: too large"),
        refuse("UNAVAILABLE: queue full"),
        refuse("failed to parse the request JSON buffer"),
    ]
    with SseServer(*scripts) as server, HttpClient(server.url) as client:
        with pytest.raises(InvalidArgument, match="^INVALID_ARG: top_p: too large$"):
            list(client.stream(text_input="a"))
        with pytest.raises(Unavailable):
            client.generate(text_input="a")
        with pytest.raises(ServerError, match="failed to parse"):
            client.generate(text_input="a")


def test_an_error_event_under_200():
    def script(exchange):
        exchange.event(error="INTERNAL: broken")
        exchange.end()

    with SseServer(first_then(script)) as server, HttpClient(server.url) as client:
        stream = client.stream(text_input="a")
        assert next(stream).text == "a"
        with pytest.raises(Internal, match="^INTERNAL: broken$"):
            next(stream)
        assert list(stream) == []


def test_an_error_under_200_without_a_stream():
    with SseServer(refuse("generate expects model to produce exactly 1 response", 200)) as server:
        with HttpClient(server.url) as client, pytest.raises(ServerError, match="exactly 1"):
            client.generate(text_input="a")


def test_something_else_than_triton():
    def script(exchange):
        exchange.head(404, "text/html")
        exchange.send(b"<p>no such page")
        exchange.end()

    with SseServer(script) as server, HttpClient(server.url) as client:
        with pytest.raises(ServerError, match="HTTP 404 .*no such page"):
            client.generate(text_input="a")


def test_a_stream_that_just_ends_is_incomplete():
    with SseServer(first_then(Exchange.end)) as server, HttpClient(server.url) as client:
        with pytest.raises(IncompleteAnswer):
            list(client.stream(text_input="a"))


def test_a_connection_that_breaks_is_told():
    with SseServer(first_then(lambda exchange: None)) as server, HttpClient(server.url) as client:
        stream = client.stream(text_input="a", retries=3)
        assert next(stream).text == "a"
        with pytest.raises(ConnectionFailed) as caught:
            next(stream)
        assert caught.value.sent
        assert len(server.exchanges) == 1


def test_an_unreachable_server_is_told():
    with HttpClient("127.0.0.1:1") as nowhere, pytest.raises(ConnectionFailed, match="127.0.0.1:1") as caught:
        nowhere.generate(text_input="a")
    assert not caught.value.sent


# ends


def test_a_server_that_never_closes_an_ended_stream_holds_nobody():
    def script(exchange):
        exchange.event(text_output="b", finish_reason="stop", token_ids=2)
        exchange.wait_until_left()

    with SseServer(first_then(script)) as server, HttpClient(server.url) as client:
        start = time.monotonic()
        assert "".join(chunk.text for chunk in client.stream(text_input="a")) == "ab"
        assert time.monotonic() - start < 30


@pytest.mark.parametrize("script", [Exchange.wait_until_left, first_then(Exchange.wait_until_left)])
def test_a_timeout_bounds_the_whole_answer(script):
    with SseServer(script) as server, HttpClient(server.url) as client:
        start = time.monotonic()
        with pytest.raises(AnswerTimeout):
            list(client.stream(text_input="a", timeout=0.3))
        assert 0.25 < time.monotonic() - start < 30
        assert server.exchanges[0].left.wait(30)


def test_dripping_does_not_extend_the_timeout():
    def drip(exchange):
        for _ in range(100):
            exchange.event(text_output="b", finish_reason="")
            time.sleep(0.1)

    with SseServer(first_then(drip)) as server, HttpClient(server.url) as client:
        start = time.monotonic()
        with pytest.raises(AnswerTimeout):
            list(client.stream(text_input="a", timeout=0.5))
        assert time.monotonic() - start < 8  # all of it takes 10 s


@pytest.mark.parametrize("script", [Exchange.wait_until_left, first_then(Exchange.wait_until_left)])
def test_another_thread_may_cancel(script):
    with SseServer(script) as server, HttpClient(server.url) as client:
        stream = client.stream(text_input="a", timeout=10)
        threading.Timer(0.3, stream.cancel).start()
        assert len(list(stream)) <= 1
        assert stream.cancelled
        assert server.exchanges[0].left.wait(3)


def test_leaving_the_context_cancels():
    with SseServer(first_then(Exchange.wait_until_left)) as server, HttpClient(server.url) as client:
        with client.stream(text_input="a") as stream:
            next(stream)
        assert stream.cancelled
        assert list(stream) == []
        assert server.exchanges[0].left.wait(3)


# retries


def test_a_refusal_is_retried_when_asked_to():
    busy = refuse("UNAVAILABLE: queue full")
    with SseServer(busy, model_refuses("UNAVAILABLE: queue full"), hello) as server, HttpClient(server.url) as client:
        stream = client.stream(text_input="a", retries=2)
        assert join(list(stream)).text == HELLO + "!"
        assert [exchange.body["id"] for exchange in server.exchanges] == [stream.request_id] * 3
    with SseServer(busy, busy) as server, HttpClient(server.url) as client:
        with pytest.raises(Unavailable):
            client.generate(text_input="a", retries=1)
        assert len(server.exchanges) == 2


def test_nothing_else_is_retried():
    scripts = (
        refuse("INTERNAL: broken"),
        lambda exchange: None,  # the connection breaks: the request may be at work
        first_then(lambda exchange: exchange.event(error="UNAVAILABLE: late") or exchange.end()),
    )
    with SseServer(*scripts) as server, HttpClient(server.url) as client:
        for count, kind in enumerate((Internal, ConnectionFailed, Unavailable), 1):
            with pytest.raises(kind):
                list(client.stream(text_input="a", retries=5))
            assert len(server.exchanges) == count


@pytest.mark.parametrize("kind", [Client, HttpClient])
def test_no_connection_is_retried_within_the_timeout(kind):
    with kind("127.0.0.1:1") as nowhere:
        start = time.monotonic()
        with pytest.raises(ConnectionFailed):
            nowhere.generate(text_input="a", retries=2)
        assert time.monotonic() - start >= 0.15  # pauses of at least 0.05 and 0.1 s
        with pytest.raises(ConnectionFailed):
            nowhere.generate(text_input="a", retries=100, timeout=0.5)
        assert time.monotonic() - start < 30


def test_cancel_ends_the_wait_for_a_retry():
    with SseServer(*[refuse("UNAVAILABLE: queue full")] * 20) as server, HttpClient(server.url) as client:
        stream = client.stream(text_input="a", retries=20)
        threading.Timer(0.5, stream.cancel).start()
        assert list(stream) == []
        assert len(server.exchanges) < 8
