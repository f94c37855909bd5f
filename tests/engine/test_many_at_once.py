"""Whatever others send, and however much at once: who is being answered goes on."""

import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.engine import thread
from kvloom.errors import Cancelled, InvalidArgument, Unavailable
from kvloom.request import FinishReason
from kvloom.text.special_tokens import ChatText
from support.running import Heard, Running
from support.talks import Talks
from support.tiny_models import make_tiny
from support.waiting import wait_until


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)


@pytest.fixture
def running(model: Path) -> Iterator[Running]:
    talks = Talks(model, kv_blocks=1024)
    made = Running(talks)
    yield made
    made.engine_thread.stop()
    talks.engine.check_invariants()


def wait_for_more(heard: Heard) -> None:
    before = len(heard)
    wait_until(lambda: len(heard) > before + 2)


def test_messages_that_come_together_are_acted_on_between_many_steps(running, monkeypatch):
    monkeypatch.setattr(thread, "LEAST_S", 0.0)
    monkeypatch.setattr(thread, "SHARE", 0.0)
    wait_for_more(running.neighbour)
    gate, seen = threading.Event(), []
    # while the engine thread is held up, everything arrives
    running.engine_thread.with_turns(lambda _: gate.wait(60))
    for _ in range(20):
        running.engine_thread.with_turns(lambda _: seen.append(len(running.neighbour)))
    gate.set()
    wait_until(lambda: len(seen) == 20)
    assert len(set(seen)) == 20, "a step for each, at least"


class Held:
    """Rendering that takes as long as a test wants."""

    def __init__(self, running: Running, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.go_on = threading.Event(), threading.Event()
        self._render = running.talks.tokenizer.render_chat
        monkeypatch.setattr(running.talks.tokenizer, "render_chat", self._held)

    def _held(self, *arguments: object) -> ChatText:
        self.begun.set()
        assert self.go_on.wait(60)
        return self._render(*arguments)


@pytest.fixture
def held(running, monkeypatch) -> Iterator[Held]:
    """A conversation, 2, whose next turn is about to be rendered."""
    assert running.chat(2, "What is a cache?", start=True).wait().reason is FinishReason.LENGTH
    made = Held(running, monkeypatch)
    yield made
    made.go_on.set()


def test_a_chat_that_is_long_to_render_holds_nobody_up(running, held):
    slow = running.chat(2, "And the dog?")
    assert held.begun.wait(60)
    wait_for_more(running.neighbour)
    assert running.say(3, start=True).wait().reason is FinishReason.LENGTH
    assert '"busy": true' in running.control("status", 2).wait().text
    assert not slow
    held.go_on.set()
    assert slow.wait().reason is FinishReason.LENGTH


def test_turns_keep_their_order_while_one_is_rendered(running, held):
    heard: list[int] = []
    turns = [running.chat(2, "one"), running.say(2), running.chat(2, "three")]
    for number, turn in enumerate(turns):
        turn.append = lambda delta, number=number: delta.final and heard.append(number)
    held.go_on.set()
    for turn in turns:
        assert turn.ended.wait(60)
    assert heard == [0, 1, 2]


def test_what_is_cancelled_while_it_is_rendered_is_part_of_the_conversation(running, held):
    slow = running.chat(2, "And the dog?")
    assert held.begun.wait(60)
    assert running.control("cancel", 2).wait().reason is FinishReason.STOP
    assert slow.wait().reason is FinishReason.CANCELLED
    after = running.say(2)
    held.go_on.set()
    assert after.wait().reason is FinishReason.LENGTH
    prompt = running.talks.tokenizer.decode(after.asked.request.prompt_ids)
    assert "And the dog?" in prompt


def test_a_restart_does_not_wait_for_what_is_rendered(running, held):
    slow, queued = running.chat(2, "And the dog?"), running.chat(2, "Why?")
    assert held.begun.wait(60)
    assert running.say(2, start=True).wait().reason is FinishReason.LENGTH
    for turn in (slow, queued):
        assert isinstance(turn.wait().error, Cancelled)
    held.go_on.set()
    assert running.say(2).wait().reason is FinishReason.LENGTH
    running.others_did_not_notice()


def test_an_end_waits_for_what_is_rendered(running, held):
    slow = running.chat(2, "And the dog?")
    ended = running.control("end", 2)
    assert held.begun.wait(60)
    wait_for_more(running.neighbour)
    assert not ended
    held.go_on.set()
    assert slow.wait().reason is FinishReason.LENGTH
    assert ended.wait().reason is FinishReason.STOP


def test_a_drain_waits_for_what_is_rendered(running, held):
    slow = running.chat(2, "And the dog?")
    assert held.begun.wait(60)
    drained = running.control("drain", admin_token="secret")
    running.engine_thread.cancel(running.neighbour.asked)
    running.neighbour.wait()
    assert not drained
    held.go_on.set()
    assert slow.wait().reason is FinishReason.LENGTH
    assert drained.wait().reason is FinishReason.STOP


def test_a_deadline_passes_while_a_turn_is_rendered(running, held):
    """Nothing else runs: nobody but the clock wakes the engine thread."""
    running.engine_thread.cancel(running.neighbour.asked)
    running.neighbour.wait()
    late = running.chat(2, "And the dog?", deadline=time.monotonic() + 0.2)
    assert held.begun.wait(60)
    assert late.wait().reason is FinishReason.DEADLINE
    held.go_on.set()
    assert running.say(2).wait().reason is FinishReason.LENGTH


def test_a_drain_does_not_wait_for_what_is_rendered_beyond_its_time(running, held):
    running.engine_thread.cancel(running.neighbour.asked)
    running.neighbour.wait()
    slow = running.chat(2, "And the dog?")
    assert held.begun.wait(60)
    drained = running.control("drain", admin_token="secret", timeout_s=0.2)
    assert isinstance(slow.wait().error, Unavailable)
    assert json.loads(drained.wait().text)["cut_short"] == 1


def test_a_stop_ends_what_is_rendered(running, held):
    slow, queued = running.chat(2, "And the dog?"), running.chat(2, "Why?")
    assert held.begun.wait(60)
    running.engine_thread.drain(0.0, lambda _: held.go_on.set())
    running.engine_thread.stop()
    for turn in (slow, queued):
        assert isinstance(turn.wait().error, Unavailable)
    assert running.engine_thread.stats.waiting == 0


def test_a_template_that_refuses_leaves_the_conversation_as_it_was(running, monkeypatch):
    assert running.chat(2, "What is a cache?", start=True).wait().reason is FinishReason.LENGTH

    def refuse(*_: object) -> str:
        raise InvalidArgument("messages", "not these")

    with monkeypatch.context() as patch:
        patch.setattr(running.talks.tokenizer, "render_chat", refuse)
        refused = [running.chat(2, "no") for _ in range(3)]
        assert [str(turn.wait().error) for turn in refused] == ["INVALID_ARG: messages: not these"] * 3
    assert running.chat(2, "Why?").wait().reason is FinishReason.LENGTH
    running.others_did_not_notice()
