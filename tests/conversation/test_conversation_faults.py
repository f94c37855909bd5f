"""Faults in conversations: each keeps what it was, and everybody hears of the end of what they asked for."""

from unittest import mock

import pytest

from kvloom.engine.answer import AnswerBuilder
from kvloom.errors import Internal, Unavailable
from support.talks import talks
from support.tiny_server import tokens


def test_a_failed_turn_leaves_the_conversation_as_it_was(model, stateless):
    driver = talks(model, test_fail_after_tokens=3)
    first = driver.say(7, tokens(1, 5), start=True)
    failing = driver.turn(7, tokens(2, 5), request_id="test-fail-1")
    after = driver.say(7, tokens(3, 5))
    assert str(failing.error).startswith("INTERNAL: ")
    assert after.ids == stateless([*tokens(1, 5), *first.ids, *tokens(3, 5)])
    # whose first turn fails was never there
    failing = driver.turn(8, tokens(2, 5), start=True, request_id="test-fail-2")
    after = driver.say(8, tokens(3, 5))
    assert str(failing.error).startswith("INTERNAL: ")
    assert str(after.error) == "NOT_FOUND: conversation 8: lost, an earlier turn failed"
    assert len(driver.turns.manager.registry) == 1
    driver.end_all()


def test_a_failed_step_leaves_conversations_as_they_were(model, stateless, monkeypatch):
    driver = talks(model, kv_blocks=12)
    histories = {number: tokens(number, 30) for number in range(4)}
    for number, history in histories.items():
        history += driver.say(number, history, start=True).ids
    for where in ("move", "run"):
        driver.turn(0, tokens(9, 40))
        with monkeypatch.context() as patch:
            patch.setattr(driver.engine._runner, where, lambda *args: 1 / 0)
            driver.engine.step()
        driver.run_all()
        for number, history in histories.items():
            history += tokens(number, 3)
            answer = driver.say(number, tokens(number, 3))
            assert answer.ids == stateless(history)
            history += answer.ids
    driver.engine.recover(Unavailable("a test"))
    for number, history in histories.items():
        history += tokens(number, 3)
        assert driver.say(number, tokens(number, 3)).ids == stateless(history)
    driver.end_all()


def failing_end(driver, sequence):
    """Let the end of a sequence's answer be a fault."""
    return mock.patch.object(driver.engine._answers[sequence], "end", side_effect=ValueError("a fault"))


def recover_from_lost_blocks(driver):
    """Step until the blocks of an answer that ends can't be kept or freed, and do as the engine thread does."""
    fault = {"side_effect": ValueError("a fault")}
    with mock.patch.multiple(driver.engine._scheduler, park=mock.Mock(**fault), remove=mock.Mock(**fault)):
        with pytest.raises(ValueError, match="a fault"):
            driver.run_all()
    driver.engine.recover(Internal("the engine failed"))
    driver.engine.check_invariants()


def test_a_turn_that_could_not_be_ended_leaves_the_conversation_as_it_was(model, stateless):
    driver = talks(model)
    first = driver.say(7, tokens(1, 5), start=True)
    failing, queued, other = driver.turn(7, tokens(2, 5)), driver.turn(7, tokens(3, 5)), driver.turn(8, [5], start=True)
    with failing_end(driver, failing.sequence):
        driver.run_all()
    assert str(failing.error) == "INTERNAL: the answer could not be ended"
    assert queued.ids == stateless([*tokens(1, 5), *first.ids, *tokens(3, 5)])
    assert other.ids == stateless([5])
    driver.end_all()


def test_a_conversation_goes_on_after_a_turn_whose_blocks_were_lost(model, stateless):
    driver = talks(model)
    first = driver.say(7, tokens(1, 5), start=True)
    failing, queued = driver.turn(7, tokens(2, 5)), driver.turn(7, tokens(3, 5))
    recover_from_lost_blocks(driver)
    assert str(failing.error) == "INTERNAL: the answer could not be ended"
    assert str(queued.error) == "INTERNAL: the engine failed"
    assert not driver.turns.status(7).busy
    driver.turns.cancel_running(7)
    again = driver.say(7, tokens(4, 5))
    assert again.ids == stateless([*tokens(1, 5), *first.ids, *tokens(4, 5)])
    driver.end_all()


@pytest.mark.parametrize("error", [None, Internal("the engine failed")])
def test_a_turn_whose_only_delta_could_not_be_made_ends_all_the_same(model, error):
    driver = talks(model)
    driver.turn(7, tokens(1, 5), start=True)
    queued = driver.turn(7, tokens(2, 5))
    with mock.patch.object(AnswerBuilder, "end", side_effect=ValueError("a fault")):
        if error is None:
            driver.engine.cancel(queued.sequence)
        else:
            driver.turns.fail_queued(error)
    assert str(queued.error) == str(error or "INTERNAL: the answer could not be ended")
    driver.run_all()
    driver.end_all()


def test_who_waits_for_the_end_of_a_replaced_conversation_hears_of_it_after_a_fault(model):
    driver, ended = talks(model), []
    driver.turn(7, tokens(1, 5), start=True, end=True)
    driver.turns.manager.end(7, lambda: ended.append(7))
    # goes on under the same id: the first one runs out without one
    driver.turn(7, tokens(2, 5), start=True, max_tokens=30)
    recover_from_lost_blocks(driver)
    assert ended == [7]
    driver.end_all()


def test_one_fault_in_a_recovery_keeps_nobody_else_waiting(model, stateless, monkeypatch):
    driver, ended = talks(model), []
    first = driver.say("idle", tokens(9, 5), start=True)
    answers = []
    for number in range(3):
        answers.append(driver.turn(number, tokens(number, 5), start=True, max_tokens=50))
        answers.append(driver.turn(number, tokens(number, 3)))
        driver.turns.manager.end(number, lambda number=number: 1 / 0 if number == 1 else ended.append(number))
    driver.engine.step()

    def fail_after(owner, method, argument):
        """Let a method be a fault, once it has done its work, where its first argument is this one."""
        work = getattr(owner, method)

        def faulty(*args, **fields):
            work(*args, **fields)
            if args and args[0] == argument:
                raise ValueError("a fault")

        monkeypatch.setattr(owner, method, faulty)

    running = answers[2].sequence
    monkeypatch.delattr(driver.engine._answers[running], "_observations")
    fail_after(driver.engine._scheduler, "_take_out", running)
    fail_after(driver.triton, "end", 0)
    driver.engine.recover(Internal("the engine failed"))
    assert all(answer.error is not None for answer in answers)
    assert ended == [0, 2]
    assert [conversation.id for conversation in driver.turns.manager.registry] == ["idle"]
    monkeypatch.undo()
    again = driver.turn("idle", tokens(8, 5))
    while driver.engine.busy:
        driver.engine.step()
    assert again.ids == stateless([*tokens(9, 5), *first.ids, *tokens(8, 5)])
