"""Retries of the gRPC clients, and what they send, against a scripted gRPC server."""

import asyncio
import json
import socket
import time
from contextlib import suppress

import grpc
import pytest

from kvloom_client import (
    AsyncClient,
    Client,
    ConnectionFailed,
    Internal,
    InvalidArgument,
    RequestFailed,
    Unavailable,
)
from support.scripted_server import BUSY, Scripted, inputs


def ask_sync(url: str, **options) -> str:
    with Client(url) as client:
        return client.generate(text_input="a", **options).text


def ask_async(url: str, **options) -> str:
    async def ask():
        async with AsyncClient(url) as client:
            return (await client.generate(text_input="a", **options)).text

    return asyncio.run(ask())


both = pytest.mark.parametrize("ask", [ask_sync, ask_async])


@both
def test_a_refusal_is_retried_when_asked_to(ask):
    with Scripted(BUSY, BUSY, ["yes"]) as server:
        assert ask(server.url, retries=2) == "yes"
        assert len({request.id for request in server.requests}) == 1
        assert len(server.requests) == 3
    with Scripted(BUSY, BUSY, ["yes"]) as server:
        with pytest.raises(Unavailable):
            ask(server.url, retries=1)
    with Scripted(BUSY, ["yes"]) as server:
        with pytest.raises(Unavailable):
            ask(server.url)


@both
def test_nothing_else_is_retried(ask):
    for text, kind in (("INTERNAL: broken", Internal), ("Stub process is not healthy", RequestFailed)):
        with Scripted(text, ["yes"]) as server:
            with pytest.raises(kind):
                ask(server.url, retries=5)
            assert len(server.requests) == 1


@both
def test_no_connection_is_retried_within_the_timeout(ask):
    # the text that gRPC gives tells that nothing was sent; it is no promise of gRPC's
    for nowhere in ("127.0.0.1:1", "no-such-host.invalid:1"):
        with pytest.raises(ConnectionFailed) as caught:
            ask(nowhere, retries=100, timeout=0.5)
        assert not caught.value.sent


@pytest.mark.full
def test_a_server_that_comes_late_is_found_soon():
    """Of whom waits for it, gRPC's pauses between two tries grow, by default to two minutes."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with Client(f"127.0.0.1:{port}") as client:
        begin = time.monotonic()
        while time.monotonic() < begin + 20:
            with pytest.raises(ConnectionFailed):
                client.generate(text_input="a")
            time.sleep(0.2)
        with Scripted(["yes"], port=port) as server:
            there = time.monotonic()
            while not server.requests and time.monotonic() < there + 3.5:
                with suppress(ConnectionFailed):
                    assert client.generate(text_input="a").text == "yes"
                time.sleep(0.1)
            assert server.requests


@both
def test_a_connection_that_breaks_is_not_retried(ask):
    class Breaks(Scripted):
        def ModelStreamInfer(self, requests, context):
            self.requests.append(next(requests))
            context.abort(grpc.StatusCode.UNAVAILABLE, "Socket closed")  # gRPC's words for it
            yield from ()

    with Breaks() as server:
        with pytest.raises(ConnectionFailed) as caught:
            ask(server.url, retries=5)
        assert caught.value.sent
        assert len(server.requests) == 1


@pytest.mark.parametrize("code", [grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.OK], ids=["broken", "incomplete"])
def test_a_cancel_after_the_stream_has_broken_just_ends_it(code):
    class Breaks(Scripted):
        def ModelStreamInfer(self, requests, context):
            self.requests.append(next(requests))
            context.set_code(code)
            yield from ()

    async def cancel_late(url: str):
        async with AsyncClient(url) as client:
            stream = client.stream(text_input="a")
            await stream._call.code()
            stream.cancel()
            assert [chunk async for chunk in stream] == []

    with Breaks() as server:
        with Client(server.url) as client:
            stream = client.stream(text_input="a")
            stream._call._messages.code()
            stream.cancel()
            assert list(stream) == []
        asyncio.run(cancel_late(server.url))


@pytest.mark.parametrize("wrong", [2**63, -(2**63) - 1, "\ud800"])
def test_a_conversation_whose_id_can_not_be_sent_is_refused_at_once(wrong):
    with Client("127.0.0.1:1") as client:
        with pytest.raises(InvalidArgument, match="^INVALID_ARG: conversation: id "):
            client.conversation(wrong).stream(text_input="a")


def test_a_cancel_ends_the_wait_for_a_retry():
    async def ask(url):
        async with AsyncClient(url) as client:
            stream = client.stream(text_input="a", retries=20)
            asyncio.get_running_loop().call_later(0.4, stream.cancel)
            assert [chunk async for chunk in stream] == []
            assert stream.cancelled

    with Scripted(*[BUSY] * 20) as server:
        asyncio.run(ask(server.url))
        assert len(server.requests) < 8


def test_what_is_sent():
    with Scripted(["a", "b"], ["c"]) as server, Client(server.url) as client:
        options = {
            "priority": -1,
            "deadline_ms": 7,
            "stream_interval_ms": 3,
            "cache_salt": "é",
            "kv": {"dtype": "bf16"},
        }
        stream = client.stream(input_ids=[1, 2], model="generate", return_usage=True, bad_words=["x"], **options)
        assert [chunk.text for chunk in stream] == ["a", "b"]
        client.generate(text_input="a")
        for_generate, for_llm = server.requests
    sent = inputs(for_generate)
    assert sent["input_ids"] == ("INT32", [1, 2], b"\1\0\0\0\2\0\0\0")
    assert sent["priority"] == ("INT32", [1, 1], b"\xff\xff\xff\xff")
    assert sent["deadline_ms"] == ("INT32", [1, 1], b"\7\0\0\0")
    assert sent["stream_interval_ms"] == ("INT32", [1, 1], b"\3\0\0\0")
    assert sent["cache_salt"] == ("BYTES", [1, 1], b"\2\0\0\0" + "é".encode())
    assert json.loads(sent["kv"][2][4:]) == {"dtype": "bf16"}
    assert json.loads(sent["sampling_parameters"][2][4:]) == {"bad_words": ["x"]}
    assert sent["stream"] == ("BOOL", [1, 1], b"\1")
    assert "return_usage" in sent
    assert "return_logprobs" not in sent
    # sequence flags are llm's alone
    assert not {"sequence_id", "sequence_start", "sequence_end"} & set(for_generate.parameters)
    assert for_llm.parameters["sequence_id"].string_param
    assert for_llm.parameters["sequence_start"].bool_param and for_llm.parameters["sequence_end"].bool_param


def test_control_requests():
    with Scripted(['{"op": "status", "ok": true}'], ["no JSON"]) as server, Client(server.url) as client:
        assert client.control("status", 7, more=1) == {"op": "status", "ok": True}
        with pytest.raises(RequestFailed, match="no JSON"):
            client.control("ping")
        first, second = (json.loads(inputs(request)["control"][2][4:]) for request in server.requests)
        assert first == {"op": "status", "conversation": 7, "more": 1}
        assert second == {"op": "ping"}
        assert len({request.parameters["sequence_id"].string_param for request in server.requests}) == 2
