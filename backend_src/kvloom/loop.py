"""The one thread that owns all state: sequences, blocks and tensors."""

import logging
import queue
import threading
from collections.abc import Callable

from kvloom.engine import Engine, Stats
from kvloom.errors import Internal, Unavailable
from kvloom.request import Request, Sequence, Sink

log = logging.getLogger(__name__)

Message = Callable[[], None]
"""What the loop's thread does for another one."""


class Loop:
    """Runs the engine in a thread of its own; the other threads leave messages in its inbox.

    ``stats`` is a snapshot that any thread may read.
    """

    def __init__(self, engine: Engine):
        self.stats: Stats = engine.stats()
        self._engine = engine
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="kvloom-loop", daemon=True)

    def start(self) -> None:
        """Start stepping."""
        self._thread.start()

    def submit(self, request: Request, sink: Sink) -> Sequence:
        """Queue a request.

        Args:
            request: what to answer.
            sink: gets the answer's deltas from the loop's thread; must not block.

        Returns:
            A handle for ``cancel``.

        Raises:
            InvalidArgument: the request can never be served; ``sink`` gets nothing.
        """
        self._engine.check(request)
        sequence = Sequence(request)
        self._inbox.put(lambda: self._engine.submit(sequence, sink))
        return sequence

    def cancel(self, sequence: Sequence) -> None:
        """End an answer as ``cancelled``; nothing happens when it has ended already."""
        self._inbox.put(lambda: self._engine.cancel(sequence))

    def post(self, message: Message) -> None:
        """Let the loop's thread run ``message`` between two steps."""
        self._inbox.put(message)

    def stop(self) -> None:
        """End all answers with an error and wait for the thread to finish."""

        def stop() -> None:
            self._stopping = True
            self._engine.fail_all(Unavailable("the server is shutting down"))

        self._inbox.put(stop)
        self._thread.join()

    def _run(self) -> None:
        while not self._stopping:
            try:
                self._handle(wait=not self._engine.busy)
                if self._engine.busy:
                    self._engine.step()
            except Exception as error:  # noqa: BLE001 without this thread every client would wait for ever
                log.exception("the engine failed outside a step")
                self._engine.fail_all(Internal(f"the engine failed: {error}"))
            self.stats = self._engine.stats()

    def _handle(self, wait: bool) -> None:
        """Act on every message there is; with ``wait``, on at least one."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            return
