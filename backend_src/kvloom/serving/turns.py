"""The running turn of each conversation, and the control operations on them. Used by execute()'s thread only."""

from collections.abc import Callable

from kvloom.errors import NotFound
from kvloom.loop import Loop
from kvloom.request import Delta, FinishReason, Sequence, Sink
from kvloom.serving.control import Control, act_on_server, answer
from kvloom.serving.sender import Sender

Conversation = int | str


class Turns:
    """Finds turns by the id of their conversation.

    Args:
        loop: where they run.
        kv_dtype: dtype of the cache, for status.
        admin_token: the setting.
    """

    def __init__(self, loop: Loop, kv_dtype: str, admin_token: str = ""):
        self._loop = loop
        self._admin_token = admin_token
        self._kv_dtype = kv_dtype
        self._running: dict[Conversation, tuple[Sender, Sequence]] = {}
        self._prune_at = 64

    def add(self, conversation: Conversation, sender: Sender, sequence: Sequence) -> None:
        """Remember a turn until its answer is over."""
        self._running[conversation] = (sender, sequence)
        if len(self._running) >= self._prune_at:
            self._running = {key: turn for key, turn in self._running.items() if not turn[0].closed}
            self._prune_at = max(64, 2 * len(self._running))

    def control(self, control: Control, own: Conversation, sink: Sink) -> None:
        """Do what a control request asks for; its answer goes to ``sink``.

        Args:
            control: what to do.
            own: the request's own conversation, meant where the control names none.
            sink: of the request.

        Raises:
            NotFound: no turn of that conversation is running.
            InvalidArgument: see ``act_on_server``.
        """

        def reply(**result: object) -> None:
            sink(Delta(answer(control, **result), (), FinishReason.STOP))

        if act_on_server(control, self._loop, self._admin_token, reply):
            return
        conversation = own if control.conversation is None else control.conversation
        sequence = self._find(conversation)
        if control.op == "cancel":
            self._loop.cancel(sequence)
            reply()
        elif control.op == "end":
            # a conversation of one turn ends with that turn
            reply()
        else:
            self._loop.post(lambda: self._status(sequence, reply))

    def _find(self, conversation: Conversation) -> Sequence:
        turn = self._running.get(conversation)
        if turn is None or turn[0].closed:
            raise NotFound(f"conversation {conversation}: no turn of it is running")
        return turn[1]

    def _status(self, sequence: Sequence, reply: Callable[..., None]) -> None:
        reply(
            tokens=len(sequence.tokens),
            blocks=len(sequence.blocks),
            dtype=self._kv_dtype,
            policy="full",
            idle_s=0.0,
            busy=True,
        )
