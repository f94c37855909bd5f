"""The thread that notices who left. Knows nothing of the engine."""

import logging
import threading
from collections.abc import Callable
from itertools import islice
from typing import Protocol

from kvloom.faults import logged

log = logging.getLogger(__name__)

CANCEL_POLL_S = 0.1
"""Seconds between two rounds of looking for who left."""

MAX_LOOKS = 96
"""Requests that a round looks at. A look takes about 30 microseconds, so this is at most 3 % of a core."""


class Watched(Protocol):
    """What the watcher needs of a ``Sender``.

    Attributes:
        closed: its final mark was sent.
        left: nobody waits for what is on its way.
    """

    closed: bool
    left: bool

    def cancelled(self) -> bool:
        """Look whether nobody waits for what is on its way, see ``left``."""
        ...


class CancelWatcher:
    """Looks regularly for clients that cancelled or went away; where there are many, at some of them in each round."""

    def __init__(self) -> None:
        # those that were not looked at for longest come first
        self._watched: dict[Watched, Callable[[], None]] = {}
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-cancel-watcher", daemon=True)
        self._thread.start()

    def watch(self, sender: Watched, on_cancel: Callable[[], None]) -> None:
        """Call ``on_cancel`` once if nobody waits any more before the answer is over; it must not block."""
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
        """Whom to look at, who are the last ones from now on; forgets those whose answers are over."""
        with self._lock:
            self._watched = {
                sender: on_cancel for sender, on_cancel in self._watched.items() if sender.left or not sender.closed
            }
            found = list(islice(self._watched.items(), MAX_LOOKS))
            for sender, on_cancel in found:
                del self._watched[sender]
                self._watched[sender] = on_cancel
        return found
