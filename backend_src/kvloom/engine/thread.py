"""The one thread that owns all state: sequences, blocks and tensors."""

import logging
import queue
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from kvloom.conversation.registry import Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.engine.engine import Engine, Stats
from kvloom.engine.idle_check import IdleCheck
from kvloom.errors import Internal, RequestError, Unavailable, as_request_error
from kvloom.faults import logged
from kvloom.request import Sequence

log = logging.getLogger(__name__)

LONGEST_WAIT_S = 3600.0
"""Of the engine thread for a message: a longer one is waited for in pieces, as timeouts have a limit."""

LEAST_S, SHARE = 0.005, 0.2
"""How long messages are acted on between two steps, in seconds and as a share of a step: at most the longer of both.

Many requests that come at once must not hold up who is being answered; a step's time is what one waits for anyway.
"""

BACKGROUND_THREADS = 2
"""Threads that render chats: more would only wait for each other, and the engine thread for them."""

Failed = Callable[[RequestError], None]
"""Hears, from the engine thread, why what was asked for does not come."""


@dataclass(frozen=True, slots=True)
class Errand:
    """What the engine thread does for another one.

    Attributes:
        act: does it.
        failed: hears of what ``act`` raises, so that who waits for an answer gets one; None: nobody waits.
    """

    act: Callable[[], None]
    failed: Failed | None = None


@dataclass(frozen=True, slots=True)
class Pulse:
    """How the engine thread is, told by itself between two steps.

    Attributes:
        since_step_s: seconds since a step finished or there was nothing to do.
        failed_steps: how many steps have failed since the last one that finished.
        draining: no request is taken any more.
    """

    since_step_s: float
    failed_steps: int
    draining: bool


class EngineThread:
    """Builds the engine and runs it in a thread of its own; the other threads leave messages in its inbox.

    The engine is built in that thread too: OpenMP keeps a team of workers for each thread that ever computed, and with
    more workers than cores they sleep between the parts of a step instead of waiting for the next one, which makes a
    step take twice as long.

    When the engine has worked and it is quiet since, its invariants are checked: a leaked block is an error in the log
    soon, not a full cache days later. A message need not wait for the rest of a check. The invariants are checked, too,
    when a message was a fault: its sender hears of it, and the others go on where nothing is broken.

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
        self._inbox: queue.SimpleQueue[Errand] = queue.SimpleQueue()
        self._stopping = False
        # until then a step had finished or there was nothing to do
        self._moved = time.monotonic()
        self._drains: list[tuple[float, Callable[[int], None]]] = []
        self._cut_short = 0
        # what the last step took, seconds
        self._step_s = 0.0
        self._background = ThreadPoolExecutor(BACKGROUND_THREADS, "kvloom-background")
        built: Future[Engine] = Future()
        self._thread = threading.Thread(target=self._live, args=(build, built), name="kvloom-engine", daemon=True)
        self._thread.start()
        self._engine = built.result()
        self.observations = self._engine.observations

    def take_turn(self, turn: Turn) -> None:
        """Queue a turn of a conversation; its sequence is a handle for ``cancel``.

        Its sink gets the answer's deltas from the engine thread, and must not block.

        Raises:
            InvalidArgument: it can never be served; its sink gets nothing.
        """
        self._engine.prepare(turn)
        self._put(lambda: self._engine.turns.submit(turn))

    def cancel(self, sequence: Sequence, error: RequestError | None = None) -> None:
        """End an answer as ``cancelled``, or with an error; nothing happens when it has ended already."""
        self._put(lambda: self._engine.cancel(sequence, error))

    def flush(self, done: Callable[[int], None], failed: Failed | None = None) -> None:
        """Drop the prefix cache; ``done`` gets the number of blocks that could be found until then."""
        self._put(lambda: done(self._engine.flush()), failed)

    def ping(self, done: Callable[[Pulse], None], failed: Failed | None = None) -> None:
        """Let the engine thread tell how it is; it does so between two steps."""
        self._put(lambda: done(self._pulse()), failed)

    def drain(self, timeout_s: float, done: Callable[[int], None], failed: Failed | None = None) -> None:
        """Take no new requests any more and let the running ones come to their end.

        Args:
            timeout_s: answers that are not over by then end with an error; may be infinite.
            done: gets, as soon as nothing runs or waits, how many those were.
            failed: hears of a fault instead.
        """
        limit = time.monotonic() + timeout_s

        def begin() -> None:
            self._engine.draining = True
            self._drains.append((limit, done))

        self._put(begin, failed)

    def with_turns(self, act: Callable[[TurnScheduler], None], failed: Failed | None = None) -> None:
        """Let the engine thread run ``act`` on the engine's conversations; ``failed`` hears of what it raises."""
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
        except Exception as error:  # noqa: BLE001 it is raised where the engine thread was made
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
            except Exception as error:  # noqa: BLE001 without this thread every client would wait for ever
                log.exception("the engine failed outside a step")
                with logged(log, "recovering the engine failed"):
                    engine.recover(Internal(f"the engine failed: {error}"))
                    self.stats = engine.stats()
        self._end_drains()

    def _handle(self, engine: Engine, wait_s: float) -> bool:
        """Act on the messages there are, but no longer than SHARE allows; wait so long for the first one.

        Returns:
            Whether there was any.
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
        """Do what another thread asks for; of what is raised there it hears, and nobody else suffers from it."""
        try:
            message.act()
        except Exception as error:  # noqa: BLE001 whatever it is, one request's fault must not end the others
            refused = isinstance(error, RequestError) and message.failed is not None
            if not refused:
                log.exception("an errand for another thread failed")
            if message.failed is not None:
                with logged(log, "could not tell the thread that asked of its failure"):
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
            with logged(log, "could not tell of the end of a drain"):
                done(self._cut_short)


def _until(when: float) -> float:
    return min(max(0.0, when - time.monotonic()), LONGEST_WAIT_S)
