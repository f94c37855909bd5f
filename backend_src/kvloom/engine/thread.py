"""The engine thread, which owns all state: sequences, blocks and tensors."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvloom.conversation.registry import Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.engine.engine import Engine
from kvloom.engine.idle_check import IdleCheck
from kvloom.engine.stats import Stats
from kvloom.errors import Internal, RequestError, Unavailable, as_request_error
from kvloom.faults import logged
from kvloom.request import Sequence

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0
"""The engine thread waits for a message at most this long at a time, since timeouts have a limit."""

LEAST_S, SHARE = 0.005, 0.2
"""The engine thread handles messages between two steps for at most LEAST_S seconds or SHARE of a step's time.

The longer of both counts. So a burst of requests does not delay running answers by much more than a step does.
"""

BACKGROUND_THREADS = 2
"""Threads that render chats. More threads would compete for Python's lock and delay the engine thread."""

Failed = Callable[[RequestError], None]
"""Called by the engine thread with the error if a message fails."""


@dataclass(frozen=True, slots=True)
class Errand:
    """A message to the engine thread: a function to run.

    Attributes:
        act: the function.
        failed: called with the error if ``act`` raises, so that a waiting client gets an answer; None: no client waits.
    """

    act: Callable[[], None]
    failed: Failed | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """The engine thread's health, reported by itself between two steps.

    Attributes:
        since_step_s: seconds since the last step finished; 0 if the engine is idle.
        failed_steps: how many steps have failed since the last one that finished.
        draining: whether new requests are refused.
    """

    since_step_s: float
    failed_steps: int
    draining: bool


class EngineThread:
    """Builds the engine and runs it in its own thread. Other threads put messages into its inbox.

    The engine thread also builds the engine, because OpenMP keeps a team of workers for each thread that has computed.
    With more workers than cores the workers sleep between the parts of a step instead of spinning, and a step takes
    twice as long.

    After the engine has worked and is idle, its invariants are checked. So a leaked block soon becomes an error in the
    log instead of a full cache days later. A new message interrupts the check. The invariants are also checked after a
    message has failed unexpectedly: if they hold, other requests continue.

    Attributes:
        stats: a snapshot that any thread may read.
        observations: measured values, to be drained by one thread.
    """

    def __init__(self, build: Callable[[], Engine]):
        """Start the thread and wait until it has built the engine.

        Raises:
            Exception: whatever ``build`` raises.
        """
        self.stats = Stats()
        self._inbox: queue.SimpleQueue[Errand] = queue.SimpleQueue()
        self._stopping = False
        # When the last step finished or the engine was last idle
        self._moved = time.monotonic()
        self._drains: list[tuple[float, Callable[[int], None]]] = []
        self._cut_short = 0
        # The duration of the last step in seconds
        self._step_s = 0.0
        self._background = ThreadPoolExecutor(BACKGROUND_THREADS, "kvloom-background")
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._live, args=(build, built), name="kvloom-engine", daemon=True)
        self._thread.start()
        self._engine = built.result()
        self.observations = self._engine.observations

    def take_turn(self, turn: Turn) -> None:
        """Queue a turn of a conversation. To cancel it, pass its sequence to ``cancel``.

        The engine thread calls its sink with the answer's deltas, so the sink must not block.

        Raises:
            InvalidArgument: the turn can never be served. Its sink gets nothing.
        """
        self._engine.prepare(turn)
        self._put(lambda: self._engine.turns.submit(turn))

    def cancel(self, sequence: Sequence, error: RequestError | None = None) -> None:
        """End an answer as ``cancelled`` or with an error. Does nothing if it has already ended."""
        self._put(lambda: self._engine.cancel(sequence, error))

    def flush(self, done: Callable[[int], None], failed: Failed | None = None) -> None:
        """Drop the prefix cache. ``done`` gets the number of blocks that were dropped from it."""
        self._put(lambda: done(self._engine.flush()), failed)

    def ping(self, done: Callable[[Pulse], None], failed: Failed | None = None) -> None:
        """Ask for the engine thread's health. It answers between two steps."""
        self._put(lambda: done(self._pulse()), failed)

    def drain(self, timeout_s: float, done: Callable[[int], None], failed: Failed | None = None) -> None:
        """Refuse new requests and let the running and waiting ones finish.

        Args:
            timeout_s: answers that take longer end with an error. It may be infinite.
            done: called when nothing runs or waits, with the number of answers that took too long.
            failed: called instead with an error if draining fails.
        """
        limit = time.monotonic() + timeout_s

        def begin() -> None:
            self._engine.draining = True
            self._drains.append((limit, done))

        self._put(begin, failed)

    def with_turns(self, act: Callable[[TurnScheduler], None], failed: Failed | None = None) -> None:
        """Let the engine thread run ``act`` on the engine's conversations. ``failed`` gets the error if it raises."""
        self._put(lambda: act(self._engine.turns), failed)

    def stop(self) -> None:
        """End all answers with an error and wait for the thread to finish."""

        def stop() -> None:
            self._stopping = self._engine.draining = True
            self._engine.fail_all(Unavailable("the server is shutting down"))

        self._put(stop)
        self._thread.join()
        self._background.shutdown(cancel_futures=True)

    def _in_background(self, work: Callable[[], None], then: Callable[[], None]) -> None:
        def run() -> None:
            work()
            self._put(then)

        self._background.submit(run)

    def _put(self, act: Callable[[], None], failed: Failed | None = None) -> None:
        self._inbox.put(Errand(act, failed))

    def _live(self, build: Callable[[], Engine], built: "Future[Engine]") -> None:
        try:
            engine = build()
            engine.turns.preparation.background = self._in_background
            self.stats = engine.stats()
        except Exception as error:  # noqa: BLE001 raised again in the thread that creates the engine thread
            built.set_exception(error)
            return
        built.set_result(engine)
        self._run(engine)

    def _run(self, engine: Engine) -> None:
        check = IdleCheck(engine.check_in_parts)
        while not self._stopping:
            try:
                if self._drains:
                    self._continue_drain(engine)
                limits = [limit for limit, _ in self._drains]
                came = self._handle(engine, 0.0 if engine.busy else _until(min(engine.wakes_at, check.due, *limits)))
                if came:
                    check.disturbed()
                elif not engine.busy and check.due <= time.monotonic():
                    check.proceed()
                    continue
                self._act(engine, Errand(engine.tick))
                if engine.busy:
                    check.worked()
                    steps, began = engine.steps, time.monotonic()
                    engine.step()
                    if engine.steps != steps:
                        self._moved = time.monotonic()
                        self._step_s = self._moved - began
                self.stats = engine.stats()
            except Exception as error:  # noqa: BLE001 if this thread ended, every client would wait for ever
                log.exception("the engine failed outside a step")
                with logged(log, "recovering the engine failed"):
                    engine.recover(Internal(f"the engine failed: {error}"))
                    self.stats = engine.stats()
        self._end_drains()

    def _handle(self, engine: Engine, wait_s: float) -> bool:
        """Handle messages for as long as LEAST_S and SHARE allow. Wait up to ``wait_s`` seconds for the first one.

        Returns:
            Whether there was a message.
        """
        try:
            message = self._inbox.get(block=wait_s > 0, timeout=wait_s)
        except queue.Empty:
            return False
        began = time.monotonic()
        if wait_s:
            self._moved = began
        self._act(engine, message)
        while time.monotonic() - began < max(LEAST_S, SHARE * self._step_s):
            try:
                message = self._inbox.get(block=False)
            except queue.Empty:
                break
            self._act(engine, message)
        return True

    def _act(self, engine: Engine, message: Errand) -> None:
        """Run a message's function and report an error to its sender, so that other requests continue."""
        try:
            message.act()
        except Exception as error:  # noqa: BLE001 one request's fault must not end the others
            refused = isinstance(error, RequestError) and message.failed is not None
            if not refused:
                log.exception("could not handle a message to the engine thread")
            if message.failed is not None:
                with logged(log, "could not report the error to the message's sender"):
                    message.failed(as_request_error(error))
            if not refused:
                engine.check_invariants()

    def _pulse(self) -> Pulse:
        since = time.monotonic() - self._moved if self._engine.busy else 0.0
        return Pulse(round(since, 3), self._engine.failed_steps, self._engine.draining)

    def _continue_drain(self, engine: Engine) -> None:
        if not engine.idle and time.monotonic() >= min(limit for limit, _ in self._drains):
            stats = engine.stats()
            self._cut_short += stats.running + stats.waiting
            engine.fail_all(Unavailable("the server is shutting down; the answer was cut short"))
        if engine.idle:
            self._end_drains()

    def _end_drains(self) -> None:
        drains, self._drains = self._drains, []
        for _, done in drains:
            with logged(log, "could not report the end of a drain"):
                done(self._cut_short)


def _until(when: float) -> float:
    return min(max(0.0, when - time.monotonic()), LONGEST_WAIT_S)
