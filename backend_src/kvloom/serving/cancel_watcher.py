"""The thread that notices clients which have cancelled or disconnected. Does not depend on the engine."""

import logging
import threading
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from kvloom.faults import logged

log = logging.getLogger(__name__)

CANCEL_POLL_S = 0.1
"""Seconds between two rounds of checks."""

MAX_LOOKS = 96
"""At most so many requests are checked per round. A check takes about 30 microseconds, so they take 3 % of a core."""


class Watched(Protocol):
    """The part of a ``Sender`` that the watcher uses.

    Attributes:
        closed: whether the final response was sent.
        left: whether the client no longer waits for responses.
    """

    closed: bool
    left: bool

    def cancelled(self) -> bool:
        """Check whether the client has left, and return ``left``."""
        ...


class CancelWatcher:
    """Checks regularly which clients have cancelled or disconnected. If there are many, a round checks some of them."""

    def __init__(self) -> None:
        # The request whose last check is the longest ago comes first
        self._watched: dict[Watched, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-cancel-watcher", daemon=True)
        self._thread.start()

    def watch(self, sender: Watched, on_cancel: Callable[[], None]) -> None:
        """Call ``on_cancel`` once if the client leaves before its answer has ended. ``on_cancel`` must not block."""
        with self._lock:
            self._watched[sender] = on_cancel

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(CANCEL_POLL_S):
            for sender, on_cancel in self._round():
                with logged(log, "could not cancel a request whose client has left"):
                    if sender.cancelled():
                        with self._lock:
                            del self._watched[sender]
                        on_cancel()

    def _round(self) -> list[tuple[Watched, Callable[[], None]]]:
        """Take the requests to check and move them to the end of the line. Forgets requests that have ended."""
        with self._lock:
            self._watched = {
                sender: on_cancel for sender, on_cancel in self._watched.items() if sender.left or not sender.closed
            }
            found = list(islice(self._watched.items(), MAX_LOOKS))
            for sender, on_cancel in found:
                del self._watched[sender]
                self._watched[sender] = on_cancel
        return found
