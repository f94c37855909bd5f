"""The file with everything that a tritonserver and its models print."""

import logging
import os
import re
import stat
import sys
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import BinaryIO

from kvloom.errors import LaunchError
from kvloom.progress import phase

log = logging.getLogger(__name__)

MODEL_SAYS = "kvloom: ERROR kvloom.serving.llm: "
"""What the line begins with in which `llm` says why it can't start."""

TOLD = re.compile(r"kvloom: (INFO kvloom\.progress|WARNING kvloom\.[\w.]+): (.*)")
"""A line of the models that is for whoever waits for the start."""

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

    def follow(self, show: Callable[[str], None]) -> Callable[[], None]:
        """Hand over each line that is appended, in a thread; returns what ends it, which may be called again.

        Of a terminal or a pipe nothing can be read again: whoever is there sees the lines themselves.
        """
        if not self._path.is_file():
            return lambda: None
        ended = threading.Event()

        def read() -> None:
            with self._path.open(encoding="utf-8", errors="replace", newline="\n") as file:
                file.seek(self._start)
                rest = ""
                while True:
                    last = ended.is_set()
                    *lines, rest = (rest + file.read()).split("\n")
                    for line in lines:
                        show(line)
                    if last:
                        if rest:
                            show(rest)
                        return
                    ended.wait(POLL_S)

        thread = threading.Thread(target=read, name="log", daemon=True)
        thread.start()

        def end() -> None:
            ended.set()
            thread.join()

        return end


def to_stderr(line: str) -> None:
    """Show every line: ``--verbose``."""
    print(line, file=sys.stderr, flush=True)


def to_log(line: str) -> None:
    """Log here what the models are doing and warn of, as if it were done here."""
    told = TOLD.fullmatch(line)
    if told is None:
        return
    if told[1].startswith("INFO"):
        phase(told[2])
    else:
        log.warning("%s", told[2])
