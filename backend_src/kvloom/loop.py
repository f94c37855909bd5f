"""The one thread that owns all state: sequences, blocks and tensors."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future

from kvloom.conversations import Turn
from kvloom.engine import Engine, Stats
from kvloom.errors import Internal, Unavailable
from kvloom.request import Request, Sequence, Sink
from kvloom.turns import Turns

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

    def take_turn(self, turn: Turn) -> None:
        """Queue a turn of a conversation; its sequence is a handle for ``cancel``.

        Raises:
            InvalidArgument: it can never be served; its sink gets nothing.
        """
        if turn.start or turn.messages is None:
            self._engine.check(turn.sequence.request)
        self._inbox.put(lambda: self._engine.turns.submit(turn))

    def cancel(self, sequence: Sequence) -> None:
        """End an answer as ``cancelled``; nothing happens when it has ended already."""
        self._inbox.put(lambda: self._engine.cancel(sequence))

    def flush(self, done: Callable[[int], None]) -> None:
        """Drop the prefix cache; ``done`` gets the number of blocks that could be found until then."""
        self._inbox.put(lambda: done(self._engine.flush()))

    def post(self, message: Message) -> None:
        """Let the loop's thread run ``message`` between two steps."""
        self._inbox.put(message)

    def with_turns(self, message: Callable[[Turns], None]) -> None:
        """Let the loop's thread run ``message`` on the engine's conversations."""
        self._inbox.put(lambda: message(self._engine.turns))

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
                self._handle(0.0 if engine.busy else _until(engine.wakes_at))
                engine.tick()
                if engine.busy:
                    checked = False
                    engine.step()
            except Exception as error:  # noqa: BLE001 without this thread every client would wait for ever
                log.exception("the engine failed outside a step")
                engine.recover(Internal(f"the engine failed: {error}"))
            self.stats = engine.stats()

    def _handle(self, wait_s: float | None) -> None:
        """Act on every message there is; wait so long for one, with None for ever."""
        try:
            while True:
                self._inbox.get(block=wait_s != 0.0, timeout=wait_s or None)()
                wait_s = 0.0
        except queue.Empty:
            return


def _until(when: float | None) -> float | None:
    return None if when is None else max(0.0, when - time.monotonic())
