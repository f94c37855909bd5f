"""Threads that send responses. An answer's responses keep their order; answers do not wait for each other."""

import queue
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress

SENDERS = 4
"""Number of threads. Sending blocks for about 100 microseconds without the GIL, so a few can keep up with a step."""

Send = Callable[[], None]
"""A function that sends a response and raises nothing."""


class Outbox:
    """The responses of one answer that are not yet sent."""

    def __init__(self, ready: "_Ready"):
        self._ready = ready
        self._sends: deque[Send] = deque()
        # Whether this is in `ready` or a thread is sending from it
        self._taken = False
        self._lock = threading.Lock()
        self.begun = False
        """Whether a response has been sent."""

    def put(self, send: Send) -> None:
        """Queue a response behind the answer's other ones. Any thread may call this; it never blocks."""
        with self._lock:
            self._sends.append(send)
            if self._taken:
                return
            self._taken = True
        self._ready.put(self)

    def send_next(self) -> None:
        """Send one response. The rest waits until the other outboxes have had their turn."""
        self.begun = True
        self._sends.popleft()()
        with self._lock:
            more = self._taken = bool(self._sends)
        if more:
            self._ready.put(self)


class _Ready:
    """The outboxes with responses to send. Those of new answers come first, because clients wait most for TTFT."""

    def __init__(self) -> None:
        # One ticket per outbox in either queue: a thread that holds a ticket finds an outbox
        self._tickets: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._beginning: deque[Outbox] = deque()
        self._others: deque[Outbox | None] = deque()

    def put(self, outbox: Outbox | None) -> None:
        """Add an outbox. None marks the end."""
        if outbox is None or outbox.begun:
            self._others.append(outbox)
        else:
            self._beginning.append(outbox)
        self._tickets.put(None)

    def get(self, block: bool = True) -> Outbox | None:
        """Take the next outbox.

        Raises:
            queue.Empty: there is none, and ``block`` is false.
        """
        self._tickets.get(block)
        try:
            return self._beginning.popleft()
        except IndexError:
            return self._others.popleft()


class Senders:
    """The threads that send the responses, one outbox after the other."""

    def __init__(self) -> None:
        self._ready = _Ready()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvloom-sender-{number}", daemon=True) for number in range(SENDERS)
        ]
        for thread in self._threads:
            thread.start()

    def outbox(self) -> Outbox:
        """Create the outbox of a new answer."""
        return Outbox(self._ready)

    def stop(self) -> None:
        """Send all queued responses, then end the threads."""
        self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (outbox := self._ready.get()) is not None:
            outbox.send_next()
        # A thread that is sending puts its outbox back itself
        with suppress(queue.Empty):
            while (outbox := self._ready.get(block=False)) is not None:
                outbox.send_next()
        self._ready.put(None)
