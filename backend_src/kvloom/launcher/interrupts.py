"""SIGINT and SIGTERM for programs that must clean up after themselves."""

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """A context manager that handles SIGINT and SIGTERM in the main thread.

    A signal only sets ``event``, so that it can't interrupt the start or stop of a process. Code that waits polls the
    event. Inside ``raising`` the first signal raises KeyboardInterrupt.

    Attributes:
        event: set by the first signal.
        signum: the number of the first signal; None before it and after ``forget``.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signum: int | None = None
        self._raising = False
        self._end: Callable[[], None] | None = None
        self._previous: dict[int, signal.Handlers] = {}

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Raise KeyboardInterrupt in the body when a signal comes, or if one has come before."""
        self._raising = True
        try:
            if self.event.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self._raising = False

    @contextmanager
    def calling(self, end: Callable[[], None]) -> Iterator[None]:
        """Call ``end`` once in a separate thread when a signal comes, or if one has come before.

        For bodies that an exception must not interrupt, for example because they hold a library's locks.
        """
        self._end = end
        try:
            if self.event.is_set():
                self._call_end()
            yield
        finally:
            self._end = None

    def forget(self) -> None:
        """Reset ``event`` and ``signum`` after a signal has been handled."""
        self.signum = None
        self.event.clear()

    def __enter__(self) -> "Interrupts":
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._previous[signum] = signal.signal(signum, self._handle)  # type: ignore[assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in self._previous.items():
            signal.signal(signum, handler)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        self.signum = self.signum or signum
        self.event.set()
        self._call_end()
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt

    def _call_end(self) -> None:
        end, self._end = self._end, None
        if end is not None:
            threading.Thread(target=end, name="kvloom-interrupt", daemon=True).start()
