"""Finds the tokens that a turn adds to its conversation. Slow work, like rendering a chat, runs in another thread."""

from array import array
from collections.abc import Callable
from functools import partial

from kvloom.conversation.continuation import ChatHistory, Continuation, continue_chat
from kvloom.conversation.registry import Conversation, Turn
from kvloom.text.tokenizer import Tokenizer

Background = Callable[[Callable[[], None], Callable[[], None]], None]
"""Calls the first function in another thread, then the second in the engine thread. The first must not raise."""


class Preparation:
    """Prepares the next turn of a conversation.

    Args:
        tokenizer: the model's tokenizer.
        context_length: the maximum number of tokens of a conversation.

    Attributes:
        background: runs work in another thread; None to do all work at once in the caller's.
    """

    background: Background | None = None

    def __init__(self, tokenizer: Tokenizer, context_length: int):
        self._tokenizer = tokenizer
        self._context_length = context_length

    def prepare(self, conversation: Conversation, turn: Turn, then: Callable[[Conversation, Turn], None]) -> bool:
        """Set ``Turn.new``. Until the turn begins or ends its conversation must not change.

        Returns:
            Whether ``Turn.new`` is set. If not, ``then`` is called as soon as it is.
        """
        history, chat = conversation.history, conversation.chat
        if not history or not self._depends_on(history[-1], turn):
            turn.new = Continuation(len(history), list(turn.sequence.request.prompt_ids), turn.rendered)
            return True

        def work() -> None:
            try:
                turn.new = self._continuation(history, chat, turn)
            except Exception as error:  # noqa: BLE001 it is raised when the turn begins
                turn.new = error

        if self.background is None:
            work()
            return True
        self.background(work, partial(then, conversation, turn))
        return False

    def _depends_on(self, last: int, turn: Turn) -> bool:
        """Whether the turn's tokens depend on the history, whose last token is ``last``."""
        if turn.start:
            return False
        return turn.messages is not None or bool(turn.text and self._tokenizer.begins_anew_after(last))

    def _continuation(self, history: "array[int]", chat: ChatHistory | None, turn: Turn) -> Continuation:
        if turn.messages is not None:
            return continue_chat(self._tokenizer, history, chat, turn.messages, self._context_length)
        ids = self._tokenizer.encode_after(history[-1], turn.text, "text_input", self._context_length)
        return Continuation(len(history), ids)
