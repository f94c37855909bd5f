"""Checks the invariants of an idle engine, without delaying requests."""

import time
from collections.abc import Callable, Iterator

QUIET_S = 0.5
"""An engine is checked after it was idle for this many seconds, when its last answer has long been sent."""


class IdleCheck:
    """Schedules the check after the engine has worked, and runs it in parts.

    Args:
        begin: begins a check. The iterator yields between two parts and raises if an invariant is violated.

    Attributes:
        due: when to check (``time.monotonic()``); infinite if the engine has not worked since the last check.
    """

    def __init__(self, begin: Callable[[], Iterator[None]]):
        self.due = float("inf")
        self._begin = begin
        self._parts: Iterator[None] | None = None

    def worked(self) -> None:
        """Note that the engine has worked. A check is due when it has been idle for a while."""
        self._parts = None
        self.due = time.monotonic() + QUIET_S

    def disturbed(self) -> None:
        """Note that the engine got a message. A pending check starts again when the engine is idle."""
        if self.due < float("inf"):
            self.worked()

    def proceed(self) -> None:
        """Run the next part of the check. After the last one no check is due."""
        if self._parts is None:
            self._parts = self._begin()
        if next(self._parts, self) is self:
            self._parts = None
            self.due = float("inf")
