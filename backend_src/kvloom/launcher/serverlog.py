"""The file with everything that a tritonserver and its models print."""

import os
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from kvloom.errors import LaunchError

MODEL_SAYS = "kvloom: ERROR kvloom.serving.llm: "
"""What the line begins with in which `llm` says why it can't start."""

TAIL_LINES = 20
TAIL_BYTES = 16384
POLL_S = 0.1


class ServerLog:
    """The part of a log file that one tritonserver writes; it is appended to what earlier ones wrote.

    Attributes:
        file: to be written to by the server; a context manager, like every file.
    """

    file: BinaryIO

    def __init__(self, path: Path):
        """Raises LaunchError: the file can't be opened."""
        try:
            # what clients ask may be in it
            self.file = open(path, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115 the caller closes it
        except OSError as error:
            raise LaunchError(f"log file {path}: {error.strerror}") from error
        found = os.fstat(self.file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid != os.geteuid():
            self.file.close()
            raise LaunchError(f"log file {path}: belongs to user {found.st_uid}, who could read what clients ask")
        self._path = path
        self._start = path.stat().st_size

    def failure(self, what: str, starting: bool) -> LaunchError:
        """An error that says what failed and what the log's last lines are.

        Where the model said why it can't start, that is all: it is one line.
        """
        try:
            with self._path.open("rb") as log:
                log.seek(max(self._start, self._path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            # somebody moved it; what failed is still to be told, and to be mended
            lines = [f"({self._path}: {error.strerror})"]
        said = [line.removeprefix(MODEL_SAYS) for line in lines if line.startswith(MODEL_SAYS)]
        if starting and said:
            return LaunchError(f"llm can't be served: {said[-1]}")
        # Triton's tables repeat what the lines before them say
        lines = [line for line in lines if not line.startswith(("+-", "| "))]
        return LaunchError("\n  | ".join([f"{what}; the end of its log ({self._path}):", *lines[-TAIL_LINES:]]))

    def follow(self) -> Callable[[], None]:
        """Copy what is appended to stderr; returns what ends it."""
        ended = threading.Event()

        def copy() -> None:
            with self._path.open("rb") as log:
                log.seek(self._start)
                while True:
                    last = ended.is_set()
                    sys.stderr.write(log.read().decode("utf-8", errors="replace"))
                    sys.stderr.flush()
                    if last:
                        return
                    ended.wait(POLL_S)

        thread = threading.Thread(target=copy, name="log", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return end
