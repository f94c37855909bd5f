"""Threads that send answers' responses: each answer's in order, and no answer waits for the rest of another."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SENDERS = 4
"""Sending blocks for about 100 microseconds with the GIL released: a few threads keep up with a busy step."""

Send = Callable[[], None]
"""Sends a response. It raises nothing."""


class Outbox:
    """One answer's responses that are still to be sent."""

    def __init__(self, ready: "queue.SimpleQueue[Outbox | None]"):
        self._ready = ready
        self._sends: deque[Send] = deque()
        # whether this is in `ready`, or a thread is sending from it
        self._taken = False
        self._lock = threading.Lock()

    def put(self, send: Send) -> None:
        """Let a response be sent after those that were put before; from any thread, never waits."""
        with self._lock:
            self._sends.append(send)
            if self._taken:
                return
            self._taken = True
        self._ready.put(self)

    def send_next(self) -> None:
        """Send one response. What is left waits until all others have had their turn."""
        self._sends.popleft()()
        with self._lock:
            more = self._taken = bool(self._sends)
        if more:
            self._ready.put(self)


class Senders:
    """The threads, which take the outboxes in turn."""

    def __init__(self) -> None:
        self._ready: queue.SimpleQueue[Outbox | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvloom-sender-{number}", daemon=True) for number in range(SENDERS)
        ]
        for thread in self._threads:
            thread.start()

    def outbox(self) -> Outbox:
        """For a new answer."""
        return Outbox(self._ready)

    def stop(self) -> None:
        """Send what is left, then end the threads."""
        self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (outbox := self._ready.get()) is not None:
            outbox.send_next()
        # what others are sending from they put back themselves
        with suppress(queue.Empty):
            while (outbox := self._ready.get_nowait()) is not None:
                outbox.send_next()
        self._ready.put(None)
