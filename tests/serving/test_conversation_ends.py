"""Conversations that nobody ends on a real server: idle ones, dead clients, a killed server."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest

from kvloom_client import Client, NotFound, TransportError, Unavailable
from support.served_conversations import expect_conversations, fresh, known_to_triton
from support.server import eventually, metrics
from support.tiny_server import BLOCK, GREEDY, tokens


@contextmanager
def left_open(client, names):
    """Conversations that a client leaves without an end."""
    talks = [client.conversation(name) for name in names]
    for talk in talks:
        talk.generate(input_ids=tokens(talk.id, 5), max_tokens=4, **GREEDY)
    yield talks


@pytest.mark.slow
def test_idle_conversations_expire(tiny):
    """H28: one clear error after the idle limit, never a hang; an answer on its way is not idle."""
    with (
        tiny.serve(conversation_idle_s=0.5, kv_blocks=8 * 4096 // BLOCK) as server,
        tiny.client(server) as client,
        ThreadPoolExecutor(7) as pool,
    ):
        talk = client.conversation(7)
        first = talk.generate(input_ids=tokens(1, 5), max_tokens=4, **GREEDY)
        time.sleep(0.2)
        second = talk.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY)
        assert second.token_ids == fresh(client, [*tokens(1, 5), *first.token_ids, *tokens(2, 5)])
        time.sleep(1.5)
        with pytest.raises(NotFound, match="^NOT_FOUND: conversation 7: expired$"):
            talk.generate(input_ids=tokens(3, 5), timeout=10)
        # the id is free: in Triton, too, and for a new conversation
        eventually(lambda: not known_to_triton(client, 7))
        begun = time.monotonic()
        # eight rows with log probabilities take their time
        slow = {"max_tokens": 4000, "logprobs": 20, **GREEDY, "timeout": 120}
        others = [pool.submit(client.generate, input_ids=tokens(100 + n, 5), **slow) for n in range(7)]
        long = talk.generate(input_ids=tokens(4, 5), **slow)
        assert time.monotonic() - begun > 0.5
        after = talk.generate(input_ids=tokens(5, 5), max_tokens=8, **GREEDY)
        assert after.token_ids == fresh(client, [*tokens(4, 5), *long.token_ids, *tokens(5, 5)])
        talk.end()
        assert all(len(other.result().token_ids) == 4000 for other in others)


def test_clients_that_die_without_an_end(tiny):
    """H30: a new conversation is served at once, in place of the one that was used longest ago."""
    with tiny.serve(max_conversations=4, conversation_idle_s=3600) as server, tiny.client(server) as survivor:
        with Client(server.grpc_url) as client, left_open(client, range(1, 5)):
            pass
        with Client(server.grpc_url) as client:
            talks = [client.conversation(number) for number in range(11, 14)]
            streams = [talk.stream(input_ids=tokens(1, 5), max_tokens=4000, timeout=60, **GREEDY) for talk in talks]
            for stream in streams:
                next(stream)
            begun = time.monotonic()
            talk = survivor.conversation("new")
            assert talk.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY).token_ids == fresh(
                survivor, tokens(2, 5)
            )
            assert time.monotonic() - begun < 30
            expect_conversations(server, 4)
            busy = talk.stream(input_ids=tokens(2, 5), max_tokens=4000, timeout=60, **GREEDY)
            next(busy)
            with pytest.raises(Unavailable, match="^UNAVAILABLE: max_conversations: all 4 conversations are busy$"):
                survivor.conversation("one more").generate(input_ids=tokens(2, 5), timeout=10)
            talk.interrupt()
            list(busy)
        # the three that died in the middle of an answer are idle now
        eventually(lambda: metrics(server)["kvloom_requests_running"] == 0)
        with left_open(survivor, range(21, 25)) as talks:
            with pytest.raises(NotFound, match="^NOT_FOUND: conversation new: evicted$"):
                talk.generate(input_ids=tokens(2, 5), timeout=10)
            for talk in talks:
                talk.end()


@pytest.mark.slow
def test_conversations_survive_a_killed_server(tiny, tmp_path):
    settings = {"journal_dir": tmp_path / "journal", "kv_blocks": 512}
    with tiny.serve(**settings) as server, Client(server.grpc_url) as client:
        histories = {}
        for name in (7, "7"):
            said = client.conversation(name).generate(input_ids=tokens(1, 40), max_tokens=8, **GREEDY).token_ids
            histories[name] = [*tokens(1, 40), *said]
        talk = client.conversation("begun")
        running = talk.stream(input_ids=tokens(2, 5), max_tokens=3000, **GREEDY, timeout=60)
        next(running)
        talk = client.conversation(7)
        talk.begun = True
        second = talk.stream(input_ids=tokens(3, 5), max_tokens=3000, **GREEDY, timeout=60)
        next(second)
        os.killpg(server.process.pid, signal.SIGKILL)
        for stream in (running, second):
            with pytest.raises(TransportError):
                list(stream)
    with tiny.serve(**settings) as server, tiny.client(server) as client:
        expect_conversations(server, 2)
        for name, history in histories.items():
            talk = client.conversation(name)
            talk.begun = True
            # Triton hears of them from `llm` itself, soon after the start
            answer = None
            deadline = time.monotonic() + 10
            while answer is None:
                try:
                    answer = talk.generate(input_ids=tokens(4, 5), max_tokens=8, **GREEDY, timeout=60)
                except NotFound as error:
                    assert "START flag" in error.text and time.monotonic() < deadline, error
                    talk.begun = True
            assert answer.num_input_tokens == len(history) + 5
            assert answer.token_ids == fresh(client, [*history, *tokens(4, 5)])
            talk.end()
        talk = client.conversation("begun")
        talk.begun = True
        with pytest.raises(NotFound, match="^NOT_FOUND: conversation begun: lost$"):
            talk.generate(input_ids=tokens(4, 5), timeout=60)
