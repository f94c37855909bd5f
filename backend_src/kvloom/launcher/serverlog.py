"""The log file with the output of tritonserver and its models."""

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
"""The beginning of the line in which `llm` logs why it can't start."""

TOLD = re.compile(r"kvloom: (INFO kvloom\.progress|WARNING kvloom\.[\w.]+): (.*)")
"""A line of the models to show to the user during a start: its progress or a warning."""

TAIL_LINES = 20
TAIL_BYTES = 16384
POLL_S = 0.1


class ServerLog:
    """The part of a log file that one tritonserver writes. It is appended to the logs of earlier servers.

    Attributes:
        file: the file for the server to write to; a context manager.
    """

    file: BinaryIO

    def __init__(self, path: Path):
        """Open the file.

        Raises:
            LaunchError: it can't be opened, or belongs to another user.
        """
        try:
            # Private, because it may contain prompts
            self.file = open(path, "ab", opener=partial(os.open, mode=0o600))  # noqa: SIM115 the caller closes it
        except OSError as error:
            raise LaunchError(f"log file {path}: {error.strerror}") from error
        found = os.fstat(self.file.fileno())
        if stat.S_ISREG(found.st_mode) and found.st_uid != os.geteuid():
            self.file.close()
            raise LaunchError(f"log file {path}: belongs to user {found.st_uid}, who could read the clients' prompts")
        self._path = path
        self._start = path.stat().st_size

    def failure(self, what: str, starting: bool) -> LaunchError:
        """An error with ``what`` has failed and the last lines of the log.

        If the server was starting and `llm` has logged why it can't start, the error has this reason only.
        """
        try:
            with self._path.open("rb") as log:
                log.seek(max(self._start, self._path.stat().st_size - TAIL_BYTES))
                lines = log.read().decode("utf-8", errors="replace").splitlines()
        except OSError as error:
            # The file was moved. The caller still needs an error with the failure
            lines = [f"({self._path}: {error.strerror})"]
        said = [line.removeprefix(MODEL_SAYS) for line in lines if line.startswith(MODEL_SAYS)]
        if starting and said:
            return LaunchError(f"can't start llm: {said[-1]}")
        # Triton's tables repeat the lines before them
        lines = [line for line in lines if not line.startswith(("+-", "| "))]
        return LaunchError("\n  | ".join([f"{what}; the end of its log ({self._path}):", *lines[-TAIL_LINES:]]))

    def follow(self, show: Callable[[str], None]) -> Callable[[], None]:
        """Call ``show`` with each appended line, in a separate thread.

        Does nothing if the log is a terminal or a pipe: it can't be read, and the user sees the lines there.

        Returns:
            A function that ends the thread. It may be called again.
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
    """Print every line on stderr, for ``--verbose``."""
    print(line, file=sys.stderr, flush=True)


def to_log(line: str) -> None:
    """Log the models' progress and warnings in this process."""
    told = TOLD.fullmatch(line)
    if told is None:
        return
    if told[1].startswith("INFO"):
        phase(told[2])
    else:
        log.warning("%s", told[2])
