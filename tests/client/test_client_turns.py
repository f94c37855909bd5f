"""What the gRPC clients know of a conversation after a turn that did not go well, against a scripted gRPC server."""

import asyncio
import json
import os
import signal
import threading
import time

import pytest

from kvloom.launcher.interrupts import Interrupts
from kvloom.launcher.terminal import ChatSession
from kvloom_client import (
    AnswerTimeout,
    AsyncClient,
    AsyncConversation,
    Client,
    Conversation,
    IncompleteAnswer,
    KvloomClientError,
    Stream,
    Unavailable,
    retry,
)
from support.scripted_server import BUSY, NEVER, Scripted, inputs, place

NOWHERE = "127.0.0.1:1"
LONG = 300.0
"""As the jitter of a retry's pause: half a minute."""

each_turn = pytest.mark.parametrize(("last", "begun"), [(False, False), (False, True), (True, False), (True, True)])


@each_turn
def test_a_cancel_between_two_tries_leaves_the_conversation_as_it_was(monkeypatch, last, begun):
    with Client(NOWHERE) as client:
        talk = client.conversation(7)
        talk.begun = begun
        stream = talk.stream(text_input="a", last=last, retries=20)
        monkeypatch.setattr(retry.random, "uniform", lambda low, high: stream.cancel() or LONG)
        assert list(stream) == []
        assert stream.cancelled
        assert talk.begun == begun


@each_turn
@pytest.mark.parametrize("whole_task", [False, True], ids=["stream", "task"])
def test_a_cancel_between_two_tries_leaves_the_conversation_as_it_was_async(monkeypatch, last, begun, whole_task):
    async def ask():
        async with AsyncClient(NOWHERE) as client:
            talk = client.conversation(7)
            talk.begun = begun
            stream = talk.stream(text_input="a", last=last, retries=20)

            async def read():
                return [chunk async for chunk in stream]

            reader = asyncio.create_task(read())
            cancel = reader.cancel if whole_task else stream.cancel
            # in the pause, which it cuts short
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(retry.random, "uniform", lambda low, high: loop.call_soon(cancel) and LONG)
            await asyncio.wait([reader], timeout=10)
            assert reader.done()
            assert reader.cancelled() == whole_task
            assert talk.begun == begun

    asyncio.run(ask())


def test_a_cancel_after_a_refused_start_leaves_no_conversation(monkeypatch):
    with Scripted(BUSY) as server, Client(server.url) as client:
        talk = client.conversation(7)
        stream = talk.stream(text_input="a", retries=20)
        monkeypatch.setattr(retry.random, "uniform", lambda low, high: stream.cancel() or LONG)
        assert list(stream) == []
        assert not talk.begun


class Lingering(Scripted):
    """Leaves the call open after its only answer, an error."""

    def ModelStreamInfer(self, requests, context):
        yield from super().ModelStreamInfer(requests, context)
        over = threading.Event()
        if context.add_callback(over.set):
            over.wait(30)


def test_a_cancel_after_an_error_does_not_cancel_the_task():
    async def ask():
        async with AsyncClient(server.url) as client:
            stream = client.stream(text_input="a")
            asyncio.get_running_loop().call_later(0.2, stream.cancel)
            with pytest.raises(Unavailable):
                await anext(stream)

    with Lingering(BUSY) as server:
        asyncio.run(ask())


class Sync:
    """Turns of one conversation, said by a plain program."""

    def __init__(self, url: str):
        self._client = Client(url)
        self.talk: Conversation = self._client.conversation(7)

    def say(self, text: str, **options: object) -> str:
        return self.talk.generate(text_input=text, **{"timeout": 30, **options}).text

    def begin_to_hear(self, text: str, chunks: int, **options: object) -> None:
        """Cancel an answer after some chunks of it."""
        with self.talk.stream(text_input=text, **options) as stream:
            for _ in range(chunks):
                next(stream)

    def close(self) -> None:
        self._client.close()


class Async:
    """Turns of one conversation, said by an asyncio program."""

    def __init__(self, url: str):
        self._run = asyncio.Runner()
        self._client, self.talk = self._run.run(self._begin(url))

    async def _begin(self, url: str) -> tuple[AsyncClient, AsyncConversation]:
        client = AsyncClient(url)
        return client, client.conversation(7)

    def say(self, text: str, **options: object) -> str:
        return self._run.run(self._say(text, {"timeout": 30, **options}))

    async def _say(self, text: str, options: dict) -> str:
        return (await self.talk.generate(text_input=text, **options)).text

    def begin_to_hear(self, text: str, chunks: int, **options: object) -> None:
        self._run.run(self._begin_to_hear(text, chunks, options))

    async def _begin_to_hear(self, text: str, chunks: int, options: dict) -> None:
        async with self.talk.stream(text_input=text, **options) as stream:
            for _ in range(chunks):
                await anext(stream)

    def close(self) -> None:
        self._run.run(self._client.close())
        self._run.close()


@pytest.fixture(params=[Sync, Async])
def speaker(request):
    made = []

    def speak(server: Scripted) -> Sync | Async:
        made.append(request.param(server.url))
        return made[-1]

    yield speak
    for one in made:
        one.close()


def test_a_last_turn_that_is_refused_is_not_sent_again(speaker):
    # the server has ended the conversation with the refusal
    with Scripted(["a"], BUSY, ["c"]) as server:
        speaks = speaker(server)
        speaks.say("a")
        with pytest.raises(Unavailable):
            speaks.say("b", last=True, retries=5)
        assert not speaks.talk.begun
        speaks.say("c")
        assert [place(request) for request in server.requests] == [(7, True, False), (7, False, True), (7, True, False)]


def test_a_last_turn_that_is_the_first_too_is_sent_again(speaker):
    with Scripted(BUSY, ["a"]) as server:
        speaks = speaker(server)
        assert speaks.say("a", last=True, retries=5) == "a"
        assert not speaks.talk.begun
        assert [place(request) for request in server.requests] == [(7, True, True)] * 2


@pytest.mark.parametrize(("answer", "kind"), [(NEVER, AnswerTimeout), ([], IncompleteAnswer)])
def test_a_last_turn_of_which_nothing_is_heard_may_have_ended_nothing(speaker, answer, kind):
    with Scripted(["a"], answer, ["b"]) as server:
        speaks = speaker(server)
        speaks.say("a")
        with pytest.raises(KvloomClientError) as caught:
            speaks.say("b", last=True, timeout=0.4)
        assert type(caught.value) is kind
        speaks.say("b", last=True)
        # a start would be answered without what was said before
        assert [place(request) for request in server.requests[1:]] == [(7, False, True)] * 2
        assert not speaks.talk.begun


@pytest.mark.parametrize("chunks", [0, 1])
def test_a_last_turn_that_is_cancelled_has_ended_the_conversation_once_it_is_answered(speaker, chunks):
    with Scripted(["a"], ["b", "c"]) as server:
        speaks = speaker(server)
        speaks.say("a")
        speaks.begin_to_hear("b", chunks, last=True)
        assert speaks.talk.begun == (chunks == 0)


def test_a_turn_that_the_chat_gives_up_is_told_again_whatever_its_tries_did_meanwhile(monkeypatch):
    cancel = Stream.cancel

    def type_next(prompt: str) -> str:
        if not lines:
            raise EOFError
        return lines.pop(0)

    def interrupt() -> None:
        limit = time.monotonic() + 10
        while len(server.requests) < 2 and time.monotonic() < limit:
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)

    def cancel_after_another_try(stream: Stream) -> None:
        if not stream.ended:
            stream._watch.sending()
        cancel(stream)

    lines = ["one", "two", "three"]
    unknown = "NOT_FOUND: conversation 7: unknown"
    # the answers to the first turn, to the second and to the interrupt of it, to the third and to the end
    answers = (["a"], NEVER, unknown, ["c"], unknown)
    with Scripted(*answers) as server, Client(server.url) as client, Interrupts() as interrupts:
        monkeypatch.setattr("builtins.input", type_next)
        monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed with the test
        monkeypatch.setattr(Stream, "cancel", cancel_after_another_try)
        threading.Thread(target=interrupt, daemon=True).start()
        ChatSession(client, {}, interrupts).run()
    third = server.requests[3]
    assert third.parameters["sequence_start"].bool_param
    said = [message["content"] for message in json.loads(inputs(third)["messages"][2][4:])]
    assert said == ["one", "a", "three"]
