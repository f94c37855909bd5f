"""The check of an engine that has nothing to do, in nobody's way."""

import time
from collections.abc import Callable, Iterator

QUIET_S = 0.5
"""Seconds of quiet after which an engine is checked: its last answer has long been sent by then."""


class IdleCheck:
    """Knows when an engine that has worked is to be checked, and how far its check has come.

    Args:
        begin: begins a check, which is over when the iterator is; what it finds wrong is raised there.

    Attributes:
        due: when there is something to check (``time.monotonic()``); infinite: nothing has happened since the last one.
    """

    def __init__(self, begin: Callable[[], Iterator[None]]):
        self.due = float("inf")
        self._begin = begin
        self._parts: Iterator[None] | None = None

    def worked(self) -> None:
        """The engine has worked: it is to be checked when it is quiet."""
        self._parts = None
        self.due = time.monotonic() + QUIET_S

    def disturbed(self) -> None:
        """Something was asked of the engine: a check that is due begins anew, when it is quiet again."""
        if self.due < float("inf"):
            self.worked()

    def proceed(self) -> None:
        """Check a bit more; at the end nothing is due."""
        if self._parts is None:
            self._parts = self._begin()
        if next(self._parts, self) is self:
            self._parts = None
            self.due = float("inf")
