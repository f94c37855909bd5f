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

    def __init__(self, ready: "_Ready"):
        self._ready = ready
        self._sends: deque[Send] = deque()
        # whether this is in `ready`, or a thread is sending from it
        self._taken = False
        self._lock = threading.Lock()
        self.begun = False
        """Whether a response was sent."""

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
        self.begun = True
        self._sends.popleft()()
        with self._lock:
            more = self._taken = bool(self._sends)
        if more:
            self._ready.put(self)


class _Ready:
    """Outboxes with something to send. Those of answers that begin come first: TTFT is what a client waits for most."""

    def __init__(self) -> None:
        # one for each outbox in either: whoever has one finds an outbox
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._beginning: deque[Outbox] = deque()
        self._others: deque[Outbox | None] = deque()

    def put(self, outbox: Outbox | None) -> None:
        """Add one; None marks the end."""
        if outbox is None or outbox.begun:
            self._others.append(outbox)
        else:
            self._beginning.append(outbox)
        self._tickets.put(None)

    def get(self, block: bool = True) -> Outbox | None:
        """Take the next one.

        Raises:
            queue.Empty: there is none, and it shall not be waited for.
        """
        self._tickets.get(block)
        try:
            return self._beginning.popleft()
        except IndexError:
            return self._others.popleft()


class Senders:
    """The threads, which take the outboxes in turn."""

    def __init__(self) -> None:
        self._ready = _Ready()
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
            while (outbox := self._ready.get(block=False)) is not None:
                outbox.send_next()
        self._ready.put(None)
