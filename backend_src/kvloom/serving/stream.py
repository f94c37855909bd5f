"""An answer's way from the engine thread to its client: merged where responses are wanted less often."""

import logging
import time
from collections.abc import Callable
from typing import Any

from kvloom.errors import Internal, RequestError
from kvloom.faults import logged
from kvloom.request import Delta
from kvloom.serving.outbox import Outbox
from kvloom.serving.sender import Sender

log = logging.getLogger(__name__)


class ResponseStream:
    """An engine's sink that sends an answer to its client.

    Calling it (from the engine thread) only queues; a thread of ``Senders`` does the work.

    Args:
        sender: of the request.
        outbox: the request's own.
        encode: makes a response's tensors from a delta.
        interval_s: least time between responses; infinite for an answer that is sent whole.
    """

    def __init__(self, sender: Sender, outbox: Outbox, encode: Callable[[Delta], list[Any]], interval_s: float = 0.0):
        self._sender = sender
        self._outbox = outbox
        self._encode = encode
        self._interval_s = interval_s
        # an answer that is sent whole is not begun with its first token
        self._next_s = 0.0 if interval_s < float("inf") else interval_s
        self._held: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        """Queue a delta, together with those held back before it, or hold it back too."""
        if delta.error is not None:
            if self._held and self._interval_s < float("inf"):
                self._send_held()
            fail(self._outbox, self._sender, delta.error)
            return
        self._held.append(delta)
        now = time.monotonic() if self._interval_s else 0.0
        if delta.final or now >= self._next_s:
            self._next_s = now + self._interval_s
            self._send_held()

    def _send_held(self) -> None:
        merged = _merge(self._held)
        self._held = []

        def send() -> None:
            if merged.final or not self._sender.left:
                self._sender.send(self._encode(merged), merged.final)

        put(self._outbox, self._sender, send)


def _merge(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish_reason=deltas[-1].finish_reason,
        usage=deltas[-1].usage,
    )


def fail(outbox: Outbox, sender: Sender, error: RequestError) -> None:
    """End a request with an error."""
    text = str(error)
    put(outbox, sender, lambda: sender.fail(text))


def put(outbox: Outbox, sender: Sender, send: Callable[[], None]) -> None:
    """Let ``send`` send a response of ``sender``'s; a fault of it ends the request."""
    outbox.put(lambda: _guarded(sender, send))


def _guarded(sender: Sender, send: Callable[[], None]) -> None:
    try:
        send()
    except Exception as error:  # noqa: BLE001 the other answers of this thread must go on
        log.exception("a response could not be sent")
        # the watcher ends the work on what is left of it; where the connection broke, this does not arrive either
        with logged(log, "a client could not be told of it"):
            sender.give_up(str(Internal(f"a response could not be sent: {error}")))
