"""An answer's way from the loop to its client: merged where responses are wanted less often, sent by a few threads."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from kvloom.errors import Internal, RequestError
from kvloom.faults import logged
from kvloom.request import Delta
from kvloom.serving.sender import Sender

log = logging.getLogger(__name__)

SENDERS = 4
"""Sending blocks for about 100 microseconds with the GIL released: a few threads keep up with a busy step."""

Outbox = queue.SimpleQueue[tuple[Sender, Callable[[], None]] | None]
"""What a sender thread still has to send, and to whom."""


class ResponseStream:
    """An engine's sink that sends an answer to its client.

    Calling it (from the loop's thread) only queues; a sender thread does the work.

    Args:
        sender: of the request.
        outbox: whose thread sends.
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
            error = str(delta.error)
            self._outbox.put((self._sender, lambda: self._sender.fail(error)))
            return
        self._held.append(delta)
        now = time.monotonic() if self._interval_s else 0.0
        if delta.final or now >= self._next_s:
            self._next_s = now + self._interval_s
            self._send_held()

    def _send_held(self) -> None:
        merged = _merge(self._held)
        self._held = []
        self._outbox.put((self._sender, lambda: self._sender.send(self._encode(merged), merged.final)))


def _merge(deltas: list[Delta]) -> Delta:
    if len(deltas) == 1:
        return deltas[0]
    return Delta(
        text="".join(delta.text for delta in deltas),
        tokens=tuple(token for delta in deltas for token in delta.tokens),
        finish_reason=deltas[-1].finish_reason,
        usage=deltas[-1].usage,
    )


class Outboxes:
    """A few threads that send; an answer stays with one of them, so that its responses keep their order."""

    def __init__(self) -> None:
        self._outboxes: list[Outbox] = [queue.SimpleQueue() for _ in range(SENDERS)]
        self._threads = [
            threading.Thread(target=_send_all, args=(outbox,), name=f"kvloom-sender-{i}", daemon=True)
            for i, outbox in enumerate(self._outboxes)
        ]
        self._taken = 0
        for thread in self._threads:
            thread.start()

    def take(self) -> Outbox:
        """An outbox for a new answer."""
        self._taken += 1
        return self._outboxes[self._taken % SENDERS]

    def stop(self) -> None:
        """Send what is queued, then end the threads."""
        for outbox in self._outboxes:
            outbox.put(None)
        for thread in self._threads:
            thread.join()


def fail(outbox: Outbox, sender: Sender, error: RequestError) -> None:
    """End a request that has no stream."""
    text = str(error)
    outbox.put((sender, lambda: sender.fail(text)))


def _send_all(outbox: Outbox) -> None:
    while (item := outbox.get()) is not None:
        sender, send = item
        try:
            send()
        except Exception as error:  # noqa: BLE001 the other answers of this thread must go on
            log.exception("a response could not be sent")
            # the watcher ends the work on what is left of it; where the connection broke, this does not arrive either
            with logged(log, "a client could not be told of it"):
                sender.give_up(str(Internal(f"a response could not be sent: {error}")))
