"""One request's way back to its client, the threads that send, and the one that notices who left."""

import logging
import queue
import threading
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.errors import RequestError
from kvloom.loop import Loop
from kvloom.request import Delta, Sequence
from kvloom.serving.wire import Call, encode

log = logging.getLogger(__name__)

SENDERS = 4
"""Sending blocks for about 100 microseconds with the GIL released: a few threads keep up with a busy step."""

CANCEL_POLL_S = 0.1
"""Seconds between looks at who left; a look costs about 30 microseconds per stream."""

_Item = tuple["ResponseStream", Delta]


class ResponseStream:
    """Sends one request's responses and exactly one final mark.

    Calling it (as an engine's sink, from the loop's thread) only queues; a sender thread does the work.
    """

    def __init__(self, sender: Any, outbox: "queue.SimpleQueue[_Item | None]"):
        self.call: Call | None = None
        self.closed = False
        self._sender = sender
        self._outbox = outbox
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        # Triton dies when is_cancelled() runs during or after the final send: both take this lock
        self._lock = threading.Lock()

    def __call__(self, delta: Delta) -> None:
        """Queue a delta; an answer that is not streamed is collected until it is whole."""
        if self.call is None or self.call.stream or delta.error is not None:
            self._outbox.put((self, delta))
            return
        self._texts.append(delta.text)
        self._token_ids += delta.token_ids
        if delta.final:
            text = self.call.echo + "".join(self._texts)
            self._outbox.put((self, Delta(text, tuple(self._token_ids), delta.finish_reason)))

    def fail(self, error: RequestError) -> None:
        """End a request that never reached the engine."""
        self(Delta("", (), error=error))

    def send(self, delta: Delta) -> None:
        """Send a delta now; called by one sender thread only, so order is kept."""
        if delta.error is not None:
            response = pb_utils.InferenceResponse(error=pb_utils.TritonError(str(delta.error)))
        else:
            assert self.call is not None, "only requests that were decoded have answers"
            response = pb_utils.InferenceResponse(encode(self.call, delta))
        flags = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if delta.final else 0
        with self._lock:
            self.closed = delta.final
            self._sender.send(response, flags)

    def cancelled(self) -> bool:
        """Whether the client left; False once the answer is over."""
        with self._lock:
            return not self.closed and self._sender.is_cancelled()


class Senders:
    """A few threads that send; a stream stays with one of them, so that its responses keep their order."""

    def __init__(self) -> None:
        self._outboxes: list[queue.SimpleQueue[_Item | None]] = [queue.SimpleQueue() for _ in range(SENDERS)]
        self._threads = [
            threading.Thread(target=_send_all, args=(outbox,), name=f"kvloom-sender-{i}", daemon=True)
            for i, outbox in enumerate(self._outboxes)
        ]
        self._opened = 0
        for thread in self._threads:
            thread.start()

    def open(self, sender: Any) -> ResponseStream:
        """A stream for a ``pb_utils`` response sender."""
        self._opened += 1
        return ResponseStream(sender, self._outboxes[self._opened % SENDERS])

    def stop(self) -> None:
        """Send what is queued, then end the threads."""
        for outbox in self._outboxes:
            outbox.put(None)
        for thread in self._threads:
            thread.join()


def _send_all(outbox: "queue.SimpleQueue[_Item | None]") -> None:
    while (item := outbox.get()) is not None:
        stream, delta = item
        try:
            stream.send(delta)
        except pb_utils.TritonModelException:
            # the connection broke; Triton marks the request as cancelled and the watcher ends its work
            log.exception("a response could not be sent")


class CancelWatcher:
    """Looks regularly for clients that cancelled or went away and ends their requests in the loop."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._watched: dict[ResponseStream, Sequence] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-cancel-watcher", daemon=True)
        self._thread.start()

    def watch(self, stream: ResponseStream, sequence: Sequence) -> None:
        """Look after a stream until it is closed."""
        with self._lock:
            self._watched[stream] = sequence

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(CANCEL_POLL_S):
            with self._lock:
                watched = list(self._watched.items())
            left = [(stream, sequence) for stream, sequence in watched if stream.cancelled()]
            for _, sequence in left:
                self._loop.cancel(sequence)
            done = [stream for stream, _ in left] + [stream for stream, _ in watched if stream.closed]
            with self._lock:
                for stream in done:
                    self._watched.pop(stream, None)
