"""Sends an answer's deltas from the engine thread to the client. Merges them if responses must not come too often."""

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
    """The sink that sends an answer to its client.

    The engine thread calls it. A call only queues the delta; a thread of ``Senders`` encodes and sends it.

    Args:
        sender: the request's sender.
        outbox: the request's outbox.
        encode: builds a response's tensors from a delta.
        interval_s: minimum time between responses in seconds. Infinite for an answer that is not streamed.
    """

    def __init__(self, sender: Sender, outbox: Outbox, encode: Callable[[Delta], list[Any]], interval_s: float = 0.0):
        self._sender = sender
        self._outbox = outbox
        self._encode = encode
        self._interval_s = interval_s
        # The first token of a streamed answer goes out at once
        self._next_s = 0.0 if interval_s < float("inf") else interval_s
        self._held: list[Delta] = []

    def __call__(self, delta: Delta) -> None:
        """Queue a delta and all deltas held back before it. Hold it back if the interval has not passed."""
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
    """Queue ``send``, which sends a response by ``sender``. If it fails, the request ends with an error."""
    outbox.put(lambda: _guarded(sender, send))


def _guarded(sender: Sender, send: Callable[[], None]) -> None:
    try:
        send()
    except Exception as error:  # noqa: BLE001 the thread must go on with other answers
        log.exception("could not send a response")
        # The watcher then cancels the rest of the answer. If the connection broke, this error does not arrive either
        with logged(log, "could not send a client its error"):
            sender.give_up(str(Internal(f"a response could not be sent: {error}")))
