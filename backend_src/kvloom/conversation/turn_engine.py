"""The part of the engine that turns use."""

from collections.abc import Collection
from typing import Protocol

from kvloom.conversation.registry import Turn
from kvloom.errors import RequestError
from kvloom.request import FinishReason, KvState, Sequence, Sink


class TurnEngine(Protocol):
    """The part of ``Engine`` that turns use."""

    def check_prompt(self, ids: Collection[int]) -> None:
        """Raise InvalidArgument for a prompt that can never be served. It includes the conversation's history."""

    def refusal(self, turn: Turn) -> RequestError | None:
        """The error for a turn that can't be served at the moment; None if it can."""

    def await_deadline(self, sequence: Sequence) -> None:
        """Set a timer that calls ``TurnScheduler.overdue`` or ends the running answer at its deadline."""

    def begin(self, sequence: Sequence, sink: Sink, held: KvState, since: float) -> None:
        """Queue the sequence of a turn. Calls ``settle`` before its final delta and ``proceed`` after it."""

    def end(self, sequence: Sequence, reason: FinishReason | None = None, error: RequestError | None = None) -> None:
        """End a sequence that has begun."""

    def answer_unbegun(
        self, sequence: Sequence, sink: Sink, reason: FinishReason | None = None, error: RequestError | None = None
    ) -> None:
        """Send the only delta of a sequence that has not begun. Logs faults and does not raise them."""
