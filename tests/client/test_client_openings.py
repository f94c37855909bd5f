"""Conversations that Triton has lost: the gRPC clients open them there again; against a scripted gRPC server."""

import asyncio
import json
import threading
import time

import pytest

from kvloom_client import (
    AnswerTimeout,
    AsyncClient,
    Client,
    ConnectionFailed,
    KvloomClientError,
    Unavailable,
    UnknownSequence,
)
from support.scripted_server import BUSY, NEVER, Scripted, inputs, place

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
