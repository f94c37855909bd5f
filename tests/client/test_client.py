import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom_client import (
    AnswerTimeout,
    AsyncClient,
    Cancelled,
    Client,
    ConnectionFailed,
    IncompleteAnswer,
    Internal,
    InvalidArgument,
    NotFound,
    RequestFailed,
    ServerError,
    Unavailable,
)
from kvloom_client.answer import Chunk, join
from kvloom_client.errors import request_error
from support.server import REFERENCE, assert_idle, canary

EXPECTED = REFERENCE[0]
PROMPT = EXPECTED["prompt"]
FIRST_16 = tuple(EXPECTED["ids"][:16])
# long enough never to end before a test has cancelled it
ENDLESS = {"text_input": PROMPT, "max_tokens": 4000, "temperature": 0.0, "ignore_eos": True}


@pytest.fixture
def left_idle(server):
    """For tests that abandon answers: the server must notice and stop working on them."""
    yield
    assert_idle(server)


def test_generate_gives_the_whole_answer(client):
    answer = client.generate(text_input=PROMPT, max_tokens=16, temperature=0.0)
    assert answer.token_ids == FIRST_16
    assert answer.text and EXPECTED["text"].startswith(answer.text)
    assert answer.finish_reason == "length"
    assert answer.num_input_tokens == len(EXPECTED["prompt_ids"])
    assert answer.num_output_tokens == 16


def test_stream_gives_the_same_answer_in_pieces(client):
    with client.stream(text_input=PROMPT, max_tokens=16, temperature=0.0) as stream:
        chunks = list(stream)
    assert len(chunks) > 4
    assert [chunk.finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["length"]
    assert join(chunks) == client.generate(text_input=PROMPT, max_tokens=16, temperature=0.0)
    assert not stream.cancelled


def test_ids_messages_and_sampling_dictionaries_are_prompts_too(client):
    by_ids = client.generate(
        input_ids=EXPECTED["prompt_ids"], sampling_parameters={"max_tokens": 99, "temperature": 0.0}, max_tokens=16
    )
    assert by_ids.token_ids == FIRST_16
    messages = [{"role": "user", "content": PROMPT}]
    by_messages = client.generate(messages=messages, max_tokens=4, temperature=0.0)
    assert by_messages.num_input_tokens > len(EXPECTED["prompt_ids"])


def test_errors_are_typed_and_the_client_goes_on(client, server):
    with pytest.raises(InvalidArgument, match="^INVALID_ARG: temperature"):
        client.generate(text_input=PROMPT, temperature=-1.0)
    with pytest.raises(InvalidArgument, match="no_such_key"):
        list(client.stream(text_input=PROMPT, sampling_parameters={"no_such_key": 1}))
    with pytest.raises(ServerError, match="no_such_model"):
        client.generate(text_input=PROMPT, model="no_such_model")
    canary(server)


@pytest.mark.parametrize(
    "prompt",
    [{}, {"text_input": "a", "input_ids": [1]}, {"input_ids": [2**31]}, {"text_input": "\ud800"}],
    ids=["none", "two", "too large an id", "half a character"],
)
def test_a_prompt_that_cannot_be_sent_is_refused_at_once(prompt):
    with Client("127.0.0.1:1") as client, pytest.raises(InvalidArgument, match="^INVALID_ARG: "):
        client.stream(**prompt)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("INVALID_ARG: top_p: too large", InvalidArgument),
        ("UNAVAILABLE: queue full", Unavailable),
        ("NOT_FOUND: conversation 7: expired", NotFound),
        ("CANCELLED: conversation restarted", Cancelled),
        ("INTERNAL: broken", Internal),
        ("Stub process 'llm_0_0' is not healthy.", ServerError),
    ],
)
def test_the_code_in_a_text_decides_the_kind_of_error(text, kind):
    error = request_error(text)
    assert type(error) is kind
    assert isinstance(error, RequestFailed)
    assert error.text == str(error) == text


def test_an_answer_without_a_reason_for_its_end_is_incomplete():
    with pytest.raises(IncompleteAnswer):
        join([Chunk("half an ans", (1,), None, 1)])


def test_cancel_ends_the_iteration_and_the_work(client, left_idle):
    stream = client.stream(**ENDLESS)
    next(stream)
    stream.cancel()
    assert list(stream) == []
    assert stream.cancelled


def test_leaving_the_context_cancels(client, left_idle):
    with client.stream(**ENDLESS) as stream:
        next(stream)
    assert stream.cancelled


def test_another_thread_may_cancel(client, left_idle):
    stream = client.stream(**ENDLESS)
    canceller = threading.Timer(0.3, stream.cancel)
    canceller.start()
    assert len(list(stream)) < 4000
    canceller.join()
    assert stream.cancelled


def test_a_timeout_ends_the_answer(client, left_idle):
    with pytest.raises(AnswerTimeout):
        list(client.stream(timeout=0.3, **ENDLESS))


def test_an_unreachable_server_is_told():
    with Client("127.0.0.1:1") as nowhere, pytest.raises(ConnectionFailed, match="127.0.0.1:1"):
        nowhere.generate(text_input=PROMPT)


def test_sixteen_threads_share_one_client(client):
    def ask(number):
        prompt = REFERENCE[number % 4]
        with client.stream(text_input=prompt["prompt"], max_tokens=6, temperature=0.0) as stream:
            return join(list(stream)).token_ids == tuple(prompt["ids"][:6])

    with ThreadPoolExecutor(16) as pool:
        assert all(pool.map(ask, range(16)))


def test_asyncio_client(server, left_idle):
    async def talk():
        async with AsyncClient(server.grpc_url) as client:
            answers = await asyncio.gather(
                *(client.generate(text_input=PROMPT, max_tokens=16, temperature=0.0) for _ in range(4))
            )
            assert {answer.token_ids for answer in answers} == {FIRST_16}

            async with client.stream(text_input=PROMPT, max_tokens=16, temperature=0.0) as stream:
                chunks = [chunk async for chunk in stream]
            assert len(chunks) > 4
            assert join(chunks) == answers[0]

            with pytest.raises(InvalidArgument, match="temperature"):
                await client.generate(text_input=PROMPT, temperature=-1.0)
            with pytest.raises(AnswerTimeout):
                await client.generate(timeout=0.3, **ENDLESS)

            stream = client.stream(**ENDLESS)
            await anext(stream)
            stream.cancel()
            assert [chunk async for chunk in stream] == []
            assert stream.cancelled

    asyncio.run(talk())


def test_a_cancelled_task_cancels_its_answer(server, left_idle):
    async def talk():
        async with AsyncClient(server.grpc_url) as client:
            task = asyncio.create_task(client.generate(**ENDLESS))
            await asyncio.sleep(0.5)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task

    asyncio.run(talk())


def test_asyncio_client_tells_an_unreachable_server():
    async def talk():
        async with AsyncClient("127.0.0.1:1") as nowhere:
            with pytest.raises(ConnectionFailed, match="127.0.0.1:1"):
                await nowhere.generate(text_input=PROMPT)

    asyncio.run(talk())
