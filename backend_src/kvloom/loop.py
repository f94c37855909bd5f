"""The one thread that owns all state: sequences, blocks and tensors."""

import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future

from kvloom.engine import Engine, Stats
from kvloom.errors import Internal, Unavailable
from kvloom.request import Request, Sequence, Sink

log = logging.getLogger(__name__)

Message = Callable[[], None]
"""What the loop's thread does for another one."""


class Loop:
    """Builds the engine and runs it in a thread of its own; the other threads leave messages in its inbox.

    The engine is built in that thread too: OpenMP keeps a team of workers for each thread that ever computed, and with
    more workers than cores they sleep between the parts of a step instead of waiting for the next one, which makes a
    step take twice as long.

    Whenever the engine has nothing to do any more, its invariants are checked: a leaked block is an error in the log
    at once, not a full cache days later.

    Attributes:
        stats: a snapshot that any thread may read.
        observations: measured values, for one thread to drain.
    """

    def __init__(self, build: Callable[[], Engine]):
        """Start the thread and wait until it has built the engine.

        Raises:
            Exception: whatever ``build`` raises.
        """
        self.stats = Stats()
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._stopping = False
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._live, args=(build, built), name="kvloom-loop", daemon=True)
        self._thread.start()
        self._engine = built.result()
        self.observations = self._engine.observations

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

    def flush(self, done: Callable[[int], None]) -> None:
        """Drop the prefix cache; ``done`` gets the number of blocks that could be found until then."""
        self._inbox.put(lambda: done(self._engine.flush()))

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

    def _live(self, build: Callable[[], Engine], built: "Future[Engine]") -> None:
        try:
            engine = build()
        except Exception as error:  # noqa: BLE001 it is raised where the loop was made
            built.set_exception(error)
            return
        self.stats = engine.stats()
        built.set_result(engine)
        self._run(engine)

    def _run(self, engine: Engine) -> None:
        checked = True
        while not self._stopping:
            try:
                if not engine.busy and not checked and self._inbox.empty():
                    checked = True
                    engine.check_invariants()
                self._handle(wait=not engine.busy)
                if engine.busy:
                    checked = False
                    engine.step()
            except Exception as error:  # noqa: BLE001 without this thread every client would wait for ever
                log.exception("the engine failed outside a step")
                engine.fail_all(Internal(f"the engine failed: {error}"))
                # a plan that was not carried out may have listed blocks that nobody computed
                engine.flush()
            self.stats = engine.stats()

    def _handle(self, wait: bool) -> None:
        """Act on every message there is; with ``wait``, on at least one."""
        try:
            while True:
                self._inbox.get(block=wait)()
                wait = False
        except queue.Empty:
            return
