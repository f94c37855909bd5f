"""Runs the turns of each conversation one after the other. Only the engine thread uses it."""

import logging
import time
from array import array
from dataclasses import dataclass, replace

from kvloom.conversation.continuation import ChatHistory, Continuation, answer_text
from kvloom.conversation.manager import ConversationManager
from kvloom.conversation.preparation import Preparation
from kvloom.conversation.queued_turns import QueuedTurns
from kvloom.conversation.registry import Conversation, ConversationId, Turn
from kvloom.conversation.turn_engine import TurnEngine
from kvloom.errors import Cancelled, InvalidArgument, NotFound, RequestError, as_request_error
from kvloom.faults import logged
from kvloom.request import FinishReason, KvState, Sequence
from kvloom.scheduling.scheduler import Scheduler
from kvloom.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Status:
    """A snapshot of a conversation.

    Attributes:
        tokens: number of tokens in its history and its running turn.
        blocks: number of blocks that it holds.
        idle_s: seconds since its last answer; 0 while it is busy.
        busy: whether a turn runs or waits.
    """

    tokens: int
    blocks: int
    idle_s: float
    busy: bool


class TurnScheduler:
    """Runs the turns of each conversation one after the other.

    A conversation's history is the prompts and answers of its finished turns, for any finish reason. A turn that fails
    does not change it.

    Args:
        engine: runs the turns.
        scheduler: holds the KV state.
        tokenizer: the model's tokenizer.
        context_length: the maximum number of tokens of a conversation.
        manager: starts and ends the conversations.

    Attributes:
        manager: starts and ends the conversations.
        preparation: finds the tokens that each turn adds.
    """

    def __init__(
        self,
        engine: TurnEngine,
        scheduler: Scheduler,
        tokenizer: Tokenizer,
        context_length: int,
        manager: ConversationManager,
    ):
        self.manager = manager
        self._engine = engine
        self._scheduler = scheduler
        self._tokenizer = tokenizer
        self.preparation = Preparation(tokenizer, context_length)
        self._running: dict[Sequence, Conversation] = {}
        self._queued = QueuedTurns(engine)

    @property
    def queued(self) -> int:
        """Number of turns that wait for an earlier turn of their conversation."""
        return len(self._queued)

    def submit(self, turn: Turn) -> None:
        """Accept a turn that the engine has prepared, or refuse it.

        Raises:
            Exception: a fault. If the turn was not accepted, its client has got an error.
        """
        try:
            conversation = self._accept(turn)
        except Exception as error:
            self._engine.answer_unbegun(turn.sequence, turn.sink, error=as_request_error(error))
            self.manager.refused(turn.conversation, turn.end)
            if isinstance(error, RequestError):
                return
            raise
        self.manager.registry.wake(conversation)
        self._queued.add(conversation, turn)
        if turn.end:
            conversation.ending, conversation.open_in_triton = True, False
        self._engine.await_deadline(turn.sequence)
        self.proceed(conversation)

    def cancel(self, sequence: Sequence) -> None:
        """End a turn that waits for an earlier turn of its conversation as cancelled."""
        self._queued.answer(sequence, FinishReason.CANCELLED)

    def overdue(self, sequence: Sequence) -> None:
        """End a turn that waits for an earlier turn of its conversation, because its deadline has passed."""
        self._queued.answer(sequence, FinishReason.DEADLINE)

    def cancel_running(self, conversation_id: ConversationId) -> None:
        """End the running turn of a conversation as cancelled.

        Raises:
            NotFound: there is no such conversation.
        """
        conversation = self.manager.registry.find(conversation_id)
        if conversation.running is not None:
            self._engine.end(conversation.running.sequence, FinishReason.CANCELLED)
        elif conversation.preparing is not None:
            self.cancel(conversation.preparing.sequence)

    def status(self, conversation_id: ConversationId) -> Status:
        """The status of a conversation.

        Raises:
            NotFound: there is no such conversation.
        """
        conversation = self.manager.registry.find(conversation_id)
        if conversation.running is not None:
            sequence = conversation.running.sequence
            return Status(len(sequence.tokens), len(sequence.blocks), 0.0, True)
        idle_s = 0.0 if conversation.busy else time.monotonic() - conversation.last_used
        return Status(len(conversation.history), len(conversation.held.blocks), idle_s, conversation.busy)

    def settle(self, sequence: Sequence, error: RequestError | None) -> Conversation | None:
        """Park the KV state of a sequence that has ended, or free it.

        If the turn can't be added to the history, the conversation is lost.

        Returns:
            The conversation of the turn, for ``proceed``; None if it has none.
        """
        conversation = self._running.pop(sequence, None)
        if conversation is None:
            self._scheduler.remove(sequence)
            return None
        turn, conversation.running = conversation.running, None
        assert turn is not None
        if error is not None or (conversation.ending and not conversation.queue):
            self._scheduler.remove(sequence)
            return conversation
        conversation.held = self._scheduler.park(sequence)
        try:
            self._note(conversation, turn, sequence.tokens)
        except Exception:  # noqa: BLE001 the answer is complete and must still be sent
            log.exception("conversation %s is lost: could not add a turn to its history", conversation.id)
            self._scheduler.discard(conversation.held)
            conversation.history = array("i")
        return conversation

    def proceed(self, conversation: Conversation) -> None:
        """Begin the next turn unless one is running. If no turn waits, the conversation becomes idle or ends."""
        while conversation.running is None and conversation.queue:
            turn = conversation.queue[0]
            if conversation.preparing is turn:
                return
            if turn.new is None and not self.preparation.prepare(conversation, turn, self._prepared):
                conversation.preparing = turn
                return
            self._queued.remove_next(conversation)
            try:
                self._begin(conversation, turn)
            except Exception as error:  # noqa: BLE001 a template's fault must not affect other requests
                if not isinstance(error, RequestError):
                    log.exception("could not begin a turn of conversation %s", conversation.id)
                if not turn.answered:
                    self._engine.answer_unbegun(turn.sequence, turn.sink, error=as_request_error(error))
        if conversation.running is not None:
            return
        if conversation.ending or not conversation.history:
            self.manager.close(conversation)
        else:
            self.manager.registry.rest(conversation, time.monotonic())

    def recover(self) -> None:
        """Free the KV state of all conversations after a fault, and begin their next turns. Every answer has ended."""
        self._running.clear()
        for conversation in self.manager.registry.everyone():
            held, conversation.held, conversation.running = conversation.held, KvState(), None
            with logged(log, "could not release the blocks of conversation %s", conversation.id):
                self._scheduler.discard(held)
            if not self.manager.registry.resting(conversation):
                with logged(log, "could not continue conversation %s", conversation.id):
                    self.proceed(conversation)

    def fail_queued(self, error: RequestError) -> None:
        """End every turn that waits for an earlier turn of its conversation with ``error``."""
        for conversation in self.manager.registry.everyone():
            was_next = conversation.preparing
            self._queued.fail(conversation, error)
            if was_next is not None:
                with logged(log, "could not continue conversation %s", conversation.id):
                    self.proceed(conversation)
        self._queued.fail_lost(error)

    def check(self) -> None:
        """Assert the invariants of turns and conversations."""
        self.manager.registry.check()
        everyone = self.manager.registry.everyone()
        running = {one.running.sequence: one for one in everyone if one.running is not None}
        assert self._running == running, "a turn runs in no conversation, or the reverse"
        self._queued.check(everyone)

    def _accept(self, turn: Turn) -> Conversation:
        """The conversation that a turn belongs to. Starts a new one if the turn does.

        Raises:
            RequestError: the turn is refused.
        """
        refusal = self._engine.refusal(turn)
        if refusal is not None:
            raise refusal
        return self._start(turn) if turn.start else self._continue(turn)

    def _start(self, turn: Turn) -> Conversation:
        old = self.manager.make_way(turn.conversation, counted=not turn.end)
        # After an end flag the old turns may finish; otherwise the restart ends them
        if old is not None and old.open_in_triton:
            self._end_turns(old, Cancelled("conversation restarted"))
        request = turn.sequence.request
        conversation = Conversation(
            turn.conversation, request.cache_salt, request.retain_s, turn.kv, counted=not turn.end
        )
        if turn.messages is not None:
            conversation.chat = ChatHistory()
        self.manager.begin(conversation)
        return conversation

    def _continue(self, turn: Turn) -> Conversation:
        conversation = self.manager.continued(turn.conversation)
        if turn.kv is not None and turn.kv != conversation.kv:
            raise InvalidArgument("kv", "differs from the conversation's first turn")
        if turn.sequence.request.cache_salt not in ("", conversation.salt):
            raise InvalidArgument("cache_salt", "differs from the conversation's first turn")
        return conversation

    def _begin(self, conversation: Conversation, turn: Turn) -> None:
        """Begin the next turn, which is prepared. If it was answered while it waited, add its prompt to the history.

        Raises:
            RequestError: the turn is refused. The conversation has not changed.
        """
        if not turn.start and not conversation.history:
            raise NotFound(f"conversation {conversation.id}: lost, an earlier turn failed")
        new, turn.new = turn.new, None
        if not isinstance(new, Continuation):
            assert new is not None, "a turn begins that was not prepared"
            raise new
        tokens = [*conversation.history[: new.keep], *new.ids]
        self._engine.check_prompt(tokens)
        sequence = turn.sequence
        sequence.rerendered = len(conversation.history) - new.keep
        if sequence.rerendered:
            self._scheduler.shorten(conversation.held, new.keep)
        sequence.request = replace(
            sequence.request, prompt_ids=tuple(tokens), cache_salt=conversation.salt, retain_s=conversation.retain_s
        )
        sequence.tokens = list(tokens)
        conversation.new = new
        if turn.answered:
            self._note(conversation, turn, tokens)
            return
        conversation.running = turn
        self._running[sequence] = conversation
        # The time that a turn waited for an earlier turn of its conversation does not count towards queue_timeout_ms
        since = sequence.request.arrival if turn.start else time.monotonic()
        try:
            self._engine.begin(sequence, turn.sink, conversation.held, since)
        except Exception:
            conversation.running = None
            del self._running[sequence]
            raise

    def _prepared(self, conversation: Conversation, turn: Turn) -> None:
        if conversation.preparing is turn:  # otherwise it has ended in the meantime
            conversation.preparing = None
            self.proceed(conversation)

    def _note(self, conversation: Conversation, turn: Turn, tokens: list[int]) -> None:
        """Make the tokens of a finished turn the conversation's history."""
        before, new, said = conversation.history, conversation.new, None
        asked = new.keep + len(new.ids)
        if turn.messages is not None and conversation.chat is not None:
            said = [*turn.messages, {"role": "assistant", "content": answer_text(self._tokenizer, tokens[asked:])}]
        conversation.history = array("i", tokens)
        if said is None:
            conversation.chat = None
        elif conversation.chat is not None:
            conversation.chat.add(said, new.rendered, new.keep, asked)
        self.manager.record(conversation, before, said)

    def _end_turns(self, conversation: Conversation, error: RequestError) -> None:
        """End a conversation and all of its turns with ``error``."""
        conversation.ending = True
        self._queued.fail(conversation, error)
        if conversation.running is not None:
            self._engine.end(conversation.running.sequence, error=error)
        else:
            self.manager.close(conversation)
