"""Delivers what leaves the engine: deltas to their sinks, and changes of conversations to Triton."""

import logging
from collections import deque
from collections.abc import Callable
from functools import partial

from kvloom.request import Delta, Sink

log = logging.getLogger(__name__)


class Deliveries:
    """A queue of calls that are made in order, at once or when the next step is running.

    Attributes:
        held: whether new calls wait for ``deliver``.
    """

    def __init__(self) -> None:
        self.held = False
        self._calls: deque[Callable[[], None]] = deque()

    def send(self, sink: Sink, delta: Delta) -> None:
        """Pass a delta to its sink."""
        self.post(partial(sink, delta))

    def post(self, *calls: Callable[[], None]) -> None:
        """Queue calls, and make them unless they are held."""
        self._calls.extend(calls)
        if not self.held:
            self.deliver()

    def deliver(self) -> None:
        """Make all queued calls. If one fails, the others are still made."""
        while self._calls:
            # Not `faults.logged`, which costs a microsecond per token
            try:
                self._calls.popleft()()
            except Exception:  # noqa: BLE001 the other calls must be made
                log.exception("could not deliver a response or tell Triton of a conversation")
