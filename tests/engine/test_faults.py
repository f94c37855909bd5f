"""Whatever is a fault inside: one final to each request, a log entry, and nobody else notices."""

import time
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

import pytest

from kvloom.conversation.registry import Turn, only_turn
from kvloom.errors import NotFound
from kvloom.request import FinishReason, Sequence
from support.running import Heard, Running
from support.talks import Talks
from support.tiny_models import make_tiny

FAULT = "INTERNAL: the engine failed: a fault"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)


@pytest.fixture
def talks(model: Path) -> Talks:
    return Talks(model, kv_blocks=1024)


def fault() -> mock.Mock:
    return mock.Mock(side_effect=ValueError("a fault"))


@pytest.fixture
def running(talks: Talks) -> Iterator[Running]:
    made = Running(talks)
    yield made
    made.engine_thread.stop()
    talks.engine.check_invariants()


CONTROLS = {
    "status": ("turns", "status"),
    "cancel": ("turns", "cancel_running"),
    "end": ("turns.manager", "end"),
    "flush": ("_cache", "flush"),
}


@pytest.mark.parametrize("op", CONTROLS)
def test_a_control_op_that_is_a_fault_gets_an_error(running, op, caplog):
    where, method = CONTROLS[op]
    owner = running.engine
    for name in where.split("."):
        owner = getattr(owner, name)
    with mock.patch.object(owner, method, fault()):
        assert str(running.control(op).wait().error) == FAULT
    assert "ValueError: a fault" in caplog.text
    running.others_did_not_notice()


def test_a_ping_that_is_a_fault_gets_an_error(running, caplog):
    with mock.patch.object(running.engine_thread, "_pulse", fault()):
        assert str(running.control("ping").wait().error) == FAULT
    assert "ValueError: a fault" in caplog.text
    running.others_did_not_notice()


def test_a_refused_control_op_is_no_fault(running, caplog):
    for op in ("status", "cancel", "end"):
        assert isinstance(running.control(op, 99).wait().error, NotFound)
    assert not caplog.records
    running.others_did_not_notice()


def test_a_drain_that_meets_faults_gets_its_answer(running):
    with mock.patch.object(running.engine, "stats", fault()):
        drained = running.control("drain", admin_token="secret", timeout_s=0.0)
        # cut short or failed: nobody knows how many those were
        assert drained.wait().reason is FinishReason.STOP
    assert running.neighbour.wait().error is not None


def test_one_who_can_not_be_told_of_a_drains_end_keeps_no_other_waiting(running):
    heard = []
    running.engine_thread.drain(0.0, fault())
    running.engine_thread.drain(0.0, heard.append)
    running.neighbour.wait()
    running.engine_thread.stop()
    assert heard == [1]


def test_a_drain_ends_with_the_loop(talks):
    running = Running(talks)
    drained = running.control("drain", admin_token="secret")
    running.engine_thread.stop()
    assert drained.wait().reason is FinishReason.STOP
    assert running.neighbour.wait().error is not None


@pytest.mark.parametrize(
    ("where", "method"),
    [("engine", "refusal"), ("manager", "make_way"), ("manager", "begin")],
)
def test_a_turn_that_is_not_taken_for_a_fault_hears_of_it(running, where, method, caplog):
    owner = running.engine if where == "engine" else running.engine.turns.manager
    with mock.patch.object(owner, method, fault()):
        assert str(running.say(2, start=True).wait().error) == FAULT
    running.others_did_not_notice()
    assert "ValueError: a fault" in caplog.text
    # as after any refused start
    assert ("end", 2) in running.talks.triton.told


def test_a_turn_that_goes_on_and_is_not_taken_for_a_fault_hears_of_it(running):
    with mock.patch.object(running.engine.turns.manager, "continued", fault()):
        assert str(running.say(1).wait().error) == FAULT
    running.others_did_not_notice()


def test_a_turn_that_can_not_begin_leaves_no_answer_behind(running):
    first = running.say(2, start=True).wait()
    assert first.reason is FinishReason.LENGTH
    with mock.patch.object(running.engine._scheduler, "add", fault()):
        assert str(running.say(2).wait().error) == FAULT
    running.others_did_not_notice()
    assert not running.engine.busy
    assert running.say(2).wait().reason is FinishReason.LENGTH


def test_a_request_without_a_conversation_that_is_a_fault_hears_of_it(running):
    for method in ("refusal", "begin"):
        heard = Heard()
        with mock.patch.object(running.engine, method, fault()):
            running.engine_thread.take_turn(only_turn(heard.sequence(4).request, heard))
            assert str(heard.wait().error) == FAULT
    running.others_did_not_notice()


def test_a_restart_answers_the_queued_turns_whatever_the_running_ones_end_meets(running):
    first, queued = running.say(2, 4000, start=True), [running.say(2) for _ in range(3)]
    again = []

    def remove(sequence: Sequence) -> None:
        taken_out(sequence)
        raise ValueError("a fault")

    taken_out = running.engine._scheduler.remove
    with mock.patch.object(running.engine._scheduler, "remove", remove):
        again.append(running.say(2, start=True))
        assert str(again[0].wait().error) == FAULT
    assert str(first.wait().error) == "INTERNAL: the answer could not be ended"
    for turn in queued:
        assert str(turn.wait().error) == "CANCELLED: conversation restarted"
    assert running.say(2, start=True).wait().reason is FinishReason.LENGTH


def test_what_a_fault_has_broken_is_mended_for_all(running):
    def lose_a_turn(*_: object) -> None:
        running.engine.turns._running.clear()
        raise ValueError("a fault")

    with mock.patch.object(running.engine.turns, "status", lose_a_turn):
        assert str(running.control("status").wait().error) == FAULT
    assert running.neighbour.wait().error is not None


def test_a_receiver_that_fails_keeps_no_other_from_hearing(running):
    failing = Heard()
    failing.append = fault()
    running.engine_thread.take_turn(Turn(3, failing.sequence(4), failing, start=True, end=True))
    deadline = time.monotonic() + 20
    while not failing.append.called:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    running.others_did_not_notice()
