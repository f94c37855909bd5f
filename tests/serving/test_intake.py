"""Requests are read in threads of their own, and what is too large is refused before it is read."""

import json
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from unittest import mock

import numpy as np
import pytest

from kvloom.errors import InvalidArgument
from kvloom.scheduling.admission import EngineLimits
from kvloom.serving import inputs
from kvloom.serving.intake import READERS, Intake
from kvloom.text import chat


@pytest.fixture
def intake() -> Iterator[Intake]:
    made = Intake()
    yield made
    made.stop()


def test_those_to_one_conversation_keep_their_order_whatever_each_takes(intake):
    held, seen = threading.Event(), []
    intake.put(7, lambda: held.wait(60))
    for number in range(100):
        intake.put(7, lambda number=number: seen.append(number))
    other = threading.Event()
    intake.put("7", other.set)
    assert other.wait(60), "another conversation waits for a long text"
    assert not seen
    held.set()
    intake.stop()
    assert seen == list(range(100))


def test_one_conversations_many_requests_do_not_come_before_anothers(intake):
    """They take turns."""
    held, seen = threading.Event(), []
    for number in range(READERS):
        intake.put(f"held {number}", lambda: held.wait(60))
    for number in range(10):
        intake.put("many", lambda number=number: seen.append(number))
    intake.put("one", lambda: seen.append("one"))
    held.set()
    intake.stop()
    assert seen.index("one") <= READERS


def test_what_is_quickly_done_waits_for_its_own_conversation_only(intake):
    held, seen = threading.Event(), []
    for number in range(READERS + 1):
        intake.put(number, lambda: held.wait(60))
    intake.do("ping", lambda: seen.append("ping"))
    assert seen == ["ping"]
    intake.do(0, lambda: seen.append("cancel"))
    assert seen == ["ping"]
    held.set()
    intake.stop()
    assert seen == ["ping", "cancel"]


def test_a_fault_ends_nothing_but_itself(intake, caplog):
    intake.put(7, mock.Mock(side_effect=ValueError("a fault")))
    done = threading.Event()
    intake.put(7, done.set)
    assert done.wait(60)
    assert "a request to conversation 7 failed and was dropped" in caplog.text


def test_a_stop_reads_what_has_come(intake):
    seen = []
    for number in range(200):
        intake.put(number % 20, lambda number=number: seen.append(number))
    intake.stop()
    assert sorted(seen) == list(range(200))


def test_messages_that_can_not_fit_are_not_parsed(monkeypatch):
    loads = mock.Mock(side_effect=json.loads)
    monkeypatch.setattr(chat.json, "loads", loads)
    fits = json.dumps([{"role": "user", "content": "\N{SNOWMAN}" * 1000}])
    assert chat.parse_messages(fits, 1000)[0]["content"] == "\N{SNOWMAN}" * 1000
    assert loads.call_count == 1
    # deeply or widely nested, it takes longest to parse
    for text in ("[" * 2_000_000, "[" + "[]," * 700_000 + "[]]", fits + " " * 2_000_000):
        with pytest.raises(InvalidArgument, match="messages: have [0-9]+ characters"):
            chat.parse_messages(text, 1000)
    assert loads.call_count == 1


def tensor(name: str, value: np.ndarray) -> SimpleNamespace:
    return SimpleNamespace(name=lambda: name, as_numpy=lambda: value)


def test_a_text_that_no_context_holds_is_refused_at_once():
    for value in ([b"a" * (inputs.MAX_BYTES + 1)], [b"a" * (inputs.MAX_BYTES // 2)] * 3):
        request = SimpleNamespace(inputs=lambda value=value: [tensor("bad_words", np.array([value], dtype=np.object_))])
        with pytest.raises(InvalidArgument, match=f"bad_words: has [0-9]+ bytes; at most {inputs.MAX_BYTES}"):
            inputs.read(request)


def test_token_ids_that_do_not_fit_are_counted_only():
    limits = EngineLimits(context_length=16, vocab_size=300, max_queue=1, kv_dtype="fp32")
    limits.check_length(15)
    with pytest.raises(InvalidArgument, match="prompt: has 16 tokens; context_length 16 takes at most 15"):
        limits.check_length(16)
