"""SIGINT and SIGTERM for programs that must clean up after themselves."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType


class Interrupts:
    """Takes SIGINT and SIGTERM of the main thread while it is entered.

    A signal sets ``event`` and nothing else, so that no start or stop of a process is torn in the middle: who waits
    polls it. Only inside ``raising`` does a signal raise KeyboardInterrupt, once.

    Attributes:
        event: set by the first signal.
        signum: number of the first signal; None before it, and after ``forget``.
    """

    def __init__(self) -> None:
        self.event = threading.Event()
        self.signum: int | None = None
        self._raising = False
        self._previous: dict[int, signal.Handlers] = {}

    @contextmanager
    def raising(self) -> Iterator[None]:
        """Let a signal, also one that came before, raise KeyboardInterrupt in the body."""
        self._raising = True
        try:
            if self.event.is_set():
                raise KeyboardInterrupt
            yield
        finally:
            self._raising = False

    def forget(self) -> None:
        """Be as if no signal had come: what it was meant for has been done."""
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
        if self._raising:
            self._raising = False
            raise KeyboardInterrupt
