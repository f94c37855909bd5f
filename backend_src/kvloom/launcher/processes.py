"""Starts the processes of a tritonserver as one group, and ends them as one even if the launcher is killed."""

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

# Waits until its input closes, which happens when the launcher ends for any reason
_GUARD = 'read -r _; kill -s KILL -- "-$1"; sleep 0.2; rm -f "$2"*; rm -rf "$3"'


def spawn(command: list[str], environment: dict[str, str], log: BinaryIO) -> "subprocess.Popen[bytes]":
    """Start a command in its own session and process group. Its output goes to ``log``.

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
            # Ctrl-C in a terminal reaches the launcher only, and the command's processes can be killed as one group
            start_new_session=True,
        )
    except OSError as error:
        raise LaunchError(f"can't start {command[0]}: {error.strerror}") from error


class Guard:
    """Kills a process group and removes its files if this process ends before it has done so, even by SIGKILL.

    The kernel's parent-death signal does not suffice: it comes when the thread ends that started the child, reaches no
    grandchildren and removes no files.
    """

    def __init__(self, group: int, shm_prefix: str, folder: Path):
        """Start the guard process.

        Args:
            group: the id of the process group.
            shm_prefix: the prefix of the names of its files in /dev/shm.
            folder: a folder to remove as well.
        """
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", _GUARD, "kvloom-guard", str(group), str(SHARED_MEMORY / shm_prefix), str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    def dismiss(self) -> None:
        """Stop the guard, because everything has been cleaned up."""
        self._process.kill()
        self._process.wait()
        assert self._process.stdin is not None
        self._process.stdin.close()


def kill_group(leader: "subprocess.Popen[bytes]") -> None:
    """Kill the remaining processes of a group and wait until they have ended."""
    with suppress(ProcessLookupError):
        os.killpg(leader.pid, signal.SIGKILL)
    leader.wait()
    deadline = time.monotonic() + KILL_GRACE_S
    while _group_alive(leader.pid) and time.monotonic() < deadline:
        time.sleep(0.01)


def remove_shared_memory(prefix: str) -> None:
    """Remove the files in /dev/shm whose names begin with ``prefix``."""
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
    """Whether a process runs. A zombie does not."""
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
