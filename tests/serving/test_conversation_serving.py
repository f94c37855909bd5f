"""Conversations on a real server: Triton sequences, their ids, flags and control requests."""

import json
import threading

import pytest
from transformers import AutoTokenizer

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Cancelled, Client, InvalidArgument, NotFound
from kvloom_client.request import Place, build_control
from support.served_conversations import expect_conversations, fresh, known_to_triton
from support.server import assert_idle, eventually
from support.tiny_models import EOS, make_sentencepiece_tiny
from support.tiny_server import GREEDY, tokens


@pytest.fixture(scope="module")
def served(tiny):
    with tiny.serve(kv_blocks=512) as server:
        yield server


@pytest.fixture
def client(tiny, served):
    with tiny.client(served) as client:
        yield client
        expect_conversations(served, 0)


@pytest.mark.parametrize("name", [7, "7", "ä name with blanks", None])
def test_a_conversation(served, client, name):
    history = []
    with client.conversation(name) as talk:
        for turn in range(5):
            new = tokens(turn, 9)
            answer = talk.generate(input_ids=new, max_tokens=8, **GREEDY, return_usage=True, timeout=60)
            history += new
            assert answer.token_ids == fresh(client, history)
            assert answer.num_input_tokens == answer.usage["prompt_tokens"] == len(history)
            assert len(history) - answer.usage["cached_tokens"] <= len(new) + 1
            history += answer.token_ids
        status = talk.status()
        assert (status["tokens"], status["dtype"], status["policy"], status["busy"]) == (85, "fp32", "full", False)
        assert status["blocks"] == 6
        expect_conversations(served, 1)
    with pytest.raises(NotFound):
        talk.status()
    with pytest.raises(NotFound, match="START"):
        talk.begun = True
        talk.generate(input_ids=[5], timeout=60)


def test_messages_and_text(client):
    with client.conversation() as talk:
        first = talk.generate(messages=[{"role": "user", "content": "Hello"}], max_tokens=5, **GREEDY)
        second = talk.generate(messages=[{"role": "user", "content": "Why?"}], max_tokens=5, **GREEDY)
        third = talk.generate(text_input=" And the dog", max_tokens=5, **GREEDY, return_usage=True)
        sizes = [answer.num_input_tokens for answer in (first, second, third)]
        assert sizes[0] + 5 < sizes[1] < sizes[2] - 5
        assert third.usage["cached_tokens"] == sizes[1] + 4
        with pytest.raises(InvalidArgument, match="^INVALID_ARG: text_input: must not be empty"):
            talk.generate(text_input="")


def test_text_after_an_end_token_begins_with_the_blank_of_its_tokenizer(tmp_path):
    folder = make_sentencepiece_tiny(tmp_path)
    settings = {"model": str(folder), "weights": "fp32", "threads": "1", "block_size": "16", "kv_blocks": "64"}
    reference = AutoTokenizer.from_pretrained(folder)
    whole = reference("where is the cache</s>there")["input_ids"]
    with (
        Server.start(ModelRepository(settings), exit_timeout_s=5) as server,
        Client(server.grpc_url) as client,
        client.conversation() as talk,
    ):
        end = talk.generate(text_input="where is the cache", logit_bias={EOS: 100.0}, temperature=0.0, timeout=60)
        assert end.token_ids == (EOS,)
        answer = talk.generate(text_input="there", max_tokens=8, **GREEDY, timeout=60)
        assert answer.num_input_tokens == len(whole)
        assert answer.token_ids == fresh(client, whole)


def test_the_last_turn_ends_it(served, client):
    talk = client.conversation(9)
    talk.generate(input_ids=tokens(1, 5), max_tokens=2)
    talk.generate(input_ids=tokens(2, 5), max_tokens=2, last=True)
    assert not talk.begun
    assert_idle(served)
    first = talk.generate(input_ids=tokens(3, 5), max_tokens=4, **GREEDY)
    assert first.token_ids == fresh(client, tokens(3, 5), 4)
    talk.end()


def test_barge_in(client):
    with client.conversation("talk") as talk:
        prompt = tokens(1, 30)
        with talk.stream(input_ids=prompt, max_tokens=3000, **GREEDY, timeout=60) as stream:
            said = list(next(stream).token_ids)
            talk.interrupt()
            for chunk in stream:
                said += chunk.token_ids
                reason = chunk.finish_reason
        assert reason == "cancelled"
        assert 1 <= len(said) < 3000
        history = [*prompt, *said, *tokens(2, 5)]
        assert talk.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY).token_ids == fresh(client, history)
        # nothing runs: nothing to interrupt
        talk.interrupt()


def test_turns_wait_their_turn(client):
    with client.conversation(5) as talk:
        history = tokens(1, 5)
        first = talk.stream(input_ids=history, max_tokens=200, **GREEDY, timeout=60)
        said = list(next(first).token_ids)
        second = talk.stream(input_ids=tokens(2, 5), max_tokens=8, **GREEDY, timeout=60)
        answer = [token for chunk in second for token in chunk.token_ids]
        said += [token for chunk in first for token in chunk.token_ids]
        assert tuple(answer) == fresh(client, [*history, *said, *tokens(2, 5)])


def test_start_on_a_live_id(client):
    """H29: one rule, whoever asks; no mix, every stream has its ending."""
    talk, other = client.conversation(7), client.conversation(7)
    old = talk.stream(input_ids=tokens(1, 5), max_tokens=3000, **GREEDY, timeout=60)
    next(old)
    new = other.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY, timeout=60)
    with pytest.raises(Cancelled, match="^CANCELLED: conversation restarted$"):
        list(old)
    assert new.token_ids == fresh(client, tokens(2, 5))
    turn = talk.generate(input_ids=tokens(3, 5), max_tokens=8, **GREEDY, timeout=60)
    assert turn.token_ids == fresh(client, [*tokens(2, 5), *new.token_ids, *tokens(3, 5)])
    # two clients at the same instant
    outcomes = {}

    def start(seed):
        try:
            mine = client.conversation(8)
            outcomes[seed] = mine.generate(input_ids=tokens(seed, 5), max_tokens=30, **GREEDY, timeout=60).token_ids
        except Cancelled as error:
            outcomes[seed] = error

    for _ in range(10):
        threads = [threading.Thread(target=start, args=(seed,)) for seed in (4, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        won = [seed for seed, outcome in outcomes.items() if not isinstance(outcome, Cancelled)]
        assert won
        assert all(outcomes[seed] == fresh(client, tokens(seed, 5), 30) for seed in won)
    client.control("end", 8)
    talk.end()


def test_seven_is_not_seven(client):
    with client.conversation(7) as number, client.conversation("7") as text:
        first = number.generate(input_ids=tokens(1, 5), max_tokens=4, **GREEDY)
        second = text.generate(input_ids=tokens(2, 5), max_tokens=4, **GREEDY)
        answer = number.generate(input_ids=tokens(3, 5), max_tokens=8, **GREEDY)
        assert answer.token_ids == fresh(client, [*tokens(1, 5), *first.token_ids, *tokens(3, 5)])
        answer = text.generate(input_ids=tokens(3, 5), max_tokens=8, **GREEDY)
        assert answer.token_ids == fresh(client, [*tokens(2, 5), *second.token_ids, *tokens(3, 5)])


def control(client, own, op, conversation=None, start=False, end=False):
    """A control request with flags of its own."""
    request = build_control(op, conversation, place=Place(own, start, end))
    with client._send(request, 30, 0) as stream:
        [chunk] = list(stream)
    assert chunk.finish_reason is None or chunk.finish_reason == "stop"
    return json.loads(chunk.text)


def test_flags_on_control_requests(served, client):
    # no conversation: nothing is left open
    control(client, "c", "ping", start=True)
    eventually(lambda: not known_to_triton(client, "c"))
    # a live one: not restarted
    talk = client.conversation("c")
    first = talk.generate(input_ids=tokens(1, 5), max_tokens=4, **GREEDY)
    assert control(client, "c", "status", start=True)["tokens"] == 9
    answer = talk.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY)
    assert answer.token_ids == fresh(client, [*tokens(1, 5), *first.token_ids, *tokens(2, 5)])
    # an end ends it, whatever the op
    assert control(client, "c", "ping", end=True)["ok"]
    assert_idle(served)
    with pytest.raises(NotFound):
        client.control("status", "c")
    assert not known_to_triton(client, "c")


def test_end_after_the_queued_turns(client):
    talk = client.conversation("c")
    stream = talk.stream(input_ids=tokens(1, 5), max_tokens=300, **GREEDY, timeout=60)
    next(stream)
    assert client.control("end", "c") == {"op": "end", "ok": True}
    # it was over by then
    assert sum(len(chunk.token_ids) for chunk in stream) == 299
    eventually(lambda: not known_to_triton(client, "c"))


def test_refused_turns_and_starts(served, client):
    talk = client.conversation("c")
    with pytest.raises(InvalidArgument, match="top_k"):
        talk.generate(input_ids=tokens(1, 5), top_k=-5)
    assert not talk.begun
    eventually(lambda: not known_to_triton(client, "c"))
    first = talk.generate(input_ids=tokens(1, 5), max_tokens=4, **GREEDY)
    with pytest.raises(InvalidArgument, match="top_k"):
        talk.generate(input_ids=tokens(1, 5), top_k=-5)
    with pytest.raises(InvalidArgument, match="^INVALID_ARG: prompt: has 4103 tokens"):
        talk.generate(input_ids=tokens(1, 4094))
    with pytest.raises(InvalidArgument, match="^INVALID_ARG: kv: differs"):
        talk.generate(input_ids=tokens(1, 5), kv={"dtype": "fp32"})
    # a start that is refused keeps the live one
    with pytest.raises(InvalidArgument, match="top_k"):
        client.conversation("c").generate(input_ids=tokens(1, 5), top_k=-5)
    answer = talk.generate(input_ids=tokens(2, 5), max_tokens=8, **GREEDY)
    assert answer.token_ids == fresh(client, [*tokens(1, 5), *first.token_ids, *tokens(2, 5)])
    # an end counts all the same
    with pytest.raises(InvalidArgument, match="top_k"):
        talk.generate(input_ids=tokens(1, 5), top_k=-5, last=True)
    assert_idle(served)
