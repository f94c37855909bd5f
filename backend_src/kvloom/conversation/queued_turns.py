"""The turns that wait for an earlier turn of their conversation. Only the engine thread uses it."""

from collections.abc import Collection, Iterator

from kvloom.conversation.registry import Conversation, Turn
from kvloom.conversation.turn_engine import TurnEngine
from kvloom.errors import RequestError
from kvloom.request import FinishReason, Sequence


class QueuedTurns:
    """The queues of all conversations, and their turns by sequence.

    Args:
        engine: sends the final delta of a turn that ends before it begins.
    """

    def __init__(self, engine: TurnEngine):
        self._engine = engine
        self._turns: dict[Sequence, Turn] = {}

    def __len__(self) -> int:
        return len(self._turns)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self._turns)

    def add(self, conversation: Conversation, turn: Turn) -> None:
        """Append a turn to its conversation's queue."""
        conversation.queue.append(turn)
        self._turns[turn.sequence] = turn

    def remove_next(self, conversation: Conversation) -> None:
        """Remove the next turn of a conversation from its queue, which must not be empty."""
        del self._turns[conversation.queue.popleft().sequence]

    def answer(self, sequence: Sequence, reason: FinishReason) -> None:
        """End the answer of a turn if it waits. The turn keeps its place: its prompt is part of the conversation."""
        turn = self._turns.get(sequence)
        if turn is not None and not turn.answered:
            turn.answered = True
            self._engine.answer_unbegun(sequence, turn.sink, reason)

    def fail(self, conversation: Conversation, error: RequestError) -> None:
        """End all waiting turns of a conversation with ``error``."""
        conversation.preparing = None
        while conversation.queue:
            turn = conversation.queue.popleft()
            self._turns.pop(turn.sequence, None)
            self._fail(turn, error)

    def fail_lost(self, error: RequestError) -> None:
        """End the remaining turns, whose conversation a fault has lost, with ``error``."""
        for turn in self._turns.values():
            self._fail(turn, error)
        self._turns.clear()

    def check(self, conversations: Collection[Conversation]) -> None:
        """Assert that exactly the turns in the queues of these conversations are here."""
        queued = {turn.sequence for conversation in conversations for turn in conversation.queue}
        assert self._turns.keys() == queued, "a turn waits in no conversation, or the reverse"

    def _fail(self, turn: Turn, error: RequestError) -> None:
        if not turn.answered:
            self._engine.answer_unbegun(turn.sequence, turn.sink, error=error)
