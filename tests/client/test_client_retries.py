"""Retries of the gRPC clients, and what they send, against a scripted gRPC server."""

import asyncio
import json
import socket
import threading
import time
from contextlib import suppress

import grpc
import pytest

from kvloom_client import (
    AnswerTimeout,
    AsyncClient,
    Client,
    ConnectionFailed,
    Internal,
    InvalidArgument,
    KvloomClientError,
    RequestFailed,
    Unavailable,
    UnknownSequence,
)
from support.scripted_server import BUSY, NEVER, Scripted, inputs, place


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


LOST_BY_TRITON = (
    "inference request for sequence 7 to model 'llm' must specify the START flag on the first request of the sequence"
)
STATUS = ['{"op": "status", "ok": true}']


def turns_sync(url: str, count: int) -> list[str]:
    with Client(url) as client:
        talk = client.conversation(7)
        return [talk.generate(text_input=str(number), timeout=30).text for number in range(count)]


def turns_async(url: str, count: int) -> list[str]:
    async def ask():
        async with AsyncClient(url) as client:
            talk = client.conversation(7)
            return [(await talk.generate(text_input=str(number), timeout=30)).text for number in range(count)]

    return asyncio.run(ask())


def three_turns_sync(url: str, timeout: float, last: bool) -> KvloomClientError:
    """The second turn's error; ``last``: it was to end the conversation."""
    with Client(url) as client:
        talk = client.conversation(7)
        talk.generate(text_input="a", timeout=30)
        with pytest.raises(KvloomClientError) as caught:
            talk.generate(text_input="b", timeout=timeout, last=last)
        talk.generate(text_input="c", timeout=30)
        return caught.value


def three_turns_async(url: str, timeout: float, last: bool) -> KvloomClientError:
    """The second turn's error; ``last``: it was to end the conversation."""

    async def ask():
        async with AsyncClient(url) as client:
            talk = client.conversation(7)
            await talk.generate(text_input="a", timeout=30)
            with pytest.raises(KvloomClientError) as caught:
                await talk.generate(text_input="b", timeout=timeout, last=last)
            await talk.generate(text_input="c", timeout=30)
            return caught.value

    return asyncio.run(ask())


both = pytest.mark.parametrize("turns", [turns_sync, turns_async], ids=["sync", "async"])


@both
def test_a_conversation_that_only_triton_has_lost_is_opened_there_and_the_turn_sent_again(turns):
    with Scripted(["a"], LOST_BY_TRITON, STATUS, ["b"]) as server:
        assert turns(server.url, 2) == ["a", "b"]
        start, turn, opening, again = server.requests
    assert place(start) == (7, True, False)
    assert place(turn) == place(again) == (7, False, False)
    assert (inputs(turn), turn.id) == (inputs(again), again.id)
    assert place(opening) == (7, True, False)
    assert json.loads(inputs(opening)["control"][2][4:]) == {"op": "status", "conversation": 7}


@both
def test_one_that_the_engine_has_not_either_is_not_found(turns):
    with Scripted(["a"], LOST_BY_TRITON, "NOT_FOUND: conversation 7: unknown") as server:
        with pytest.raises(UnknownSequence, match="START flag"):
            turns(server.url, 2)
        assert server.answers == []


@both
def test_it_is_opened_once(turns):
    with Scripted(["a"], LOST_BY_TRITON, STATUS, LOST_BY_TRITON) as server:
        with pytest.raises(UnknownSequence):
            turns(server.url, 2)
        assert server.answers == []


@both
def test_a_conversation_that_begins_is_not_opened(turns):
    with Scripted(LOST_BY_TRITON) as server, pytest.raises(UnknownSequence):
        turns(server.url, 1)


@pytest.mark.parametrize("three_turns", [three_turns_sync, three_turns_async], ids=["sync", "async"])
@pytest.mark.parametrize("last", [False, True])
@pytest.mark.parametrize(("opening", "kind", "timeout"), [(BUSY, Unavailable, 30), (NEVER, AnswerTimeout, 0.5)])
def test_an_opening_that_fails_says_nothing_of_the_conversation(three_turns, opening, kind, timeout, last):
    with Scripted(["a"], LOST_BY_TRITON, opening, ["c"]) as server:
        assert type(three_turns(server.url, timeout, last)) is kind
        # a start would make the server forget what it may well have
        assert place(server.requests[-1]) == (7, False, False)


def waiting_for_the_opening(server: Scripted) -> None:
    limit = time.monotonic() + 10
    while len(server.requests) < 3:
        assert time.monotonic() < limit
        time.sleep(0.01)


def test_a_cancel_ends_the_wait_for_an_opening():
    with Scripted(["a"], LOST_BY_TRITON, NEVER) as server, Client(server.url) as client:
        talk = client.conversation(7)
        talk.generate(text_input="a")
        stream = talk.stream(text_input="b", last=True)
        chunks = []
        reader = threading.Thread(target=lambda: chunks.append(list(stream)), daemon=True)
        reader.start()
        waiting_for_the_opening(server)
        stream.cancel()
        reader.join(10)
        assert chunks == [[]]
        assert stream.cancelled
        assert talk.begun  # nobody has ended it


def test_a_cancel_ends_the_wait_for_an_opening_async():
    async def ask(server):
        async with AsyncClient(server.url) as client:
            talk = client.conversation(7)
            await talk.generate(text_input="a")
            stream = talk.stream(text_input="b", last=True)

            async def read():
                return [chunk async for chunk in stream]

            reader = asyncio.create_task(read())
            await asyncio.to_thread(waiting_for_the_opening, server)
            stream.cancel()
            assert await asyncio.wait_for(reader, 10) == []
            assert stream.cancelled
            assert talk.begun

    with Scripted(["a"], LOST_BY_TRITON, NEVER) as server:
        asyncio.run(ask(server))


@pytest.mark.parametrize("begun", [False, True])
def test_a_last_turn_that_is_not_sent_ends_nothing(begun):
    with Client("127.0.0.1:1") as client:
        talk = client.conversation(7)
        talk.begun = begun
        with pytest.raises(ConnectionFailed):
            talk.generate(text_input="a", last=True, timeout=30)
        assert talk.begun == begun


def test_a_last_turn_that_is_not_sent_ends_nothing_async():
    async def ask():
        async with AsyncClient("127.0.0.1:1") as client:
            talk = client.conversation(7)
            talk.begun = True
            with pytest.raises(ConnectionFailed):
                await talk.generate(text_input="a", last=True, timeout=30)
            assert talk.begun

    asyncio.run(ask())


def test_a_last_turn_after_an_opening_is_the_last():
    with Scripted(["a"], LOST_BY_TRITON, STATUS, ["b"], ["c"]) as server, Client(server.url) as client:
        talk = client.conversation(7)
        talk.generate(text_input="a", timeout=30)
        talk.generate(text_input="b", timeout=30, last=True)
        assert not talk.begun
        talk.generate(text_input="c", timeout=30)
        assert [place(request) for request in server.requests[3:]] == [(7, False, True), (7, True, False)]
