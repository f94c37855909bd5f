"""The processes of a tritonserver: started as one group, and ended as one whatever becomes of who started them."""

import os
import re
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import psutil

from kvloom.errors import LaunchError

SHARED_MEMORY = Path("/dev/shm")
KILL_GRACE_S = 5.0

# waits for the end of its input, which is the end of who holds the other end, however that came about
_GUARD = 'read -r _; kill -s KILL -- "-$1"; sleep 0.2; rm -f "$2"*; rm -rf "$3"'


def spawn(command: list[str], environment: dict[str, str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a command that leads a session and process group of its own; what it prints goes to ``log``.

    Raises:
        LaunchError: it can't be started.
    """
    try:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            # Ctrl-C in a terminal goes to the launcher only, and everything it started can be killed as one group
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"{command[0]}: can't be started: {error.strerror}") from error


class Guard:
    """Kills a process group and removes its files if this process ends without having done so itself, by SIGKILL too.

    The kernel's own signal at a parent's death comes at the end of the thread that started the child already, reaches
    no grandchild and removes no files.
    """

    def __init__(self, group: int, shm_prefix: str, folder: Path):
        """Begin to watch.

        Args:
            group: its id.
            shm_prefix: what the names of its files in /dev/shm begin with.
            folder: is removed too.
        """
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "kvloom-guard", str(group), str(SHARED_MEMORY / shm_prefix), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Everything has been taken down; do nothing."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def kill_group(leader: "subprocess.Popen[bytes]") -> None:
    """Kill whoever is left of a group and wait until they are gone."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + KILL_GRACE_S
    while _group_alive(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def remove_shared_memory(prefix: str) -> None:
    """Remove the files in /dev/shm whose names begin so."""
    for path in SHARED_MEMORY.glob(f"{prefix}*"):
        path.unlink(missing_ok=True)


def stubs_of(tritonserver: int) -> dict[str, psutil.Process]:
    """The processes that run the models' Python, by model."""
    found = {}
    for child in psutil.Process(tritonserver).children(recursive=True):
        with suppress(psutil.NoSuchProcess):
            match = re.search(r"/([^/ ]+)/\d+/model\.py( |$)", " ".join(child.cmdline()))
            if match is not None:
                found[match[1]] = child
    return found


def alive(process: psutil.Process) -> bool:
    """Whether it still runs; who is dead but not reaped by its parent does not count."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def _group_alive(group: int) -> bool:
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False
