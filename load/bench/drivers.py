"""The engines' drivers as child processes."""

import json
import re
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from bench.cases import Run
from bench.peers import Environment
from bench.variants import Variant
from kvloom.cores import usable_cores

LOAD = Path(__file__).parents[1]
LOG_LINES = 5
END_S = 60
SETTLE_S = 0.5
GROWTH = 16 * 2**20


class EngineFailed(Exception):
    """An engine could not be loaded, or a run failed. The message says why."""


class Driver:
    """One engine in a separate process, see ``engines.protocol``. A context manager that ends it.

    The process is stopped (SIGSTOP) while it has nothing to do, because some engines keep a core busy while they wait.
    It has its own process group in the same session. So if the benchmark is killed, the kernel sends SIGHUP and SIGCONT
    to the group.
    """

    def __init__(self, variant: Variant, settled: bool = True):
        """Start the driver and load the model.

        Args:
            variant: the engine and its settings.
            settled: whether to wait until the engine has settled.

        Raises:
            EngineFailed: it can't be loaded.
        """
        self.variant = variant
        self._log = tempfile.NamedTemporaryFile(prefix="kvloom-bench-", suffix=".log")  # noqa: SIM115 see close
        self._process = subprocess.Popen(
            [str(Environment(variant.environment).python), "-m", f"bench.engines.{variant.engine}"],
            cwd=LOAD,  # where Python finds bench
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            process_group=0,
        )
        try:
            options = {**variant.options, "threads": str(usable_cores().count)}
            loaded = self._ask({"load": {"model": str(variant.model), "options": options}})
        except EngineFailed:
            self.close()
            raise
        self.load_seconds: float = loaded["seconds"]
        self.versions: dict[str, str] = loaded["versions"]
        self._pid: int = loaded["pid"]
        if settled:
            self._settle()
        self._pause()

    def run(self, run: Run) -> tuple[float, list[list[int]]]:
        """Do a run. Returns its seconds and the new tokens of each prompt.

        Raises:
            EngineFailed: the run failed, or an answer does not have the requested length.
        """
        self._go_on()
        try:
            reply = self._ask({"run": {"prompts": run.prompts, "new": run.new}})
        finally:
            self._pause()
        tokens: list[list[int]] = reply["tokens"]
        lengths = [len(answer) for answer in tokens]
        if lengths != [run.new] * len(run.prompts):
            raise EngineFailed(f"{run.name}: answers of {sorted(set(lengths))} tokens instead of {run.new}")
        return reply["seconds"], tokens

    def peak_rss(self) -> int:
        """The sum of the peak memory of the engine's processes, in bytes."""
        return sum(_peak(process.pid) for process in _tree(self._pid))

    def rss(self) -> int:
        """The sum of the current memory of the engine's processes, in bytes."""
        return sum(map(_rss, _tree(self._pid)))

    def close(self) -> None:
        """End the engine and its processes."""
        assert self._process.stdin is not None
        self._go_on()
        self._process.stdin.close()
        try:
            self._process.wait(END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def __enter__(self) -> "Driver":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _settle(self) -> None:
        """Wait until the engine's memory no longer grows."""
        before = 0
        while (now := self.rss()) > before + GROWTH:
            before = now
            time.sleep(SETTLE_S)

    def _pause(self) -> None:
        for process in _tree(self._process.pid):
            process.suspend()

    def _go_on(self) -> None:
        for process in reversed(_tree(self._process.pid)):
            process.resume()

    def _ask(self, message: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        try:
            print(json.dumps(message), file=self._process.stdin, flush=True)
        except BrokenPipeError:
            raise self._ended() from None
        line = self._process.stdout.readline()
        if not line:
            raise self._ended()
        reply = json.loads(line)
        if "error" in reply:
            raise EngineFailed(reply["error"])
        return reply

    def _ended(self) -> EngineFailed:
        code = self._process.wait()
        lines = [line for line in Path(self._log.name).read_text(errors="replace").splitlines() if line.strip()]
        return EngineFailed(f"its process ended with exit code {code}: {' | '.join(lines[-LOG_LINES:])}")


def _tree(pid: int) -> list[psutil.Process]:
    """A process and its descendants; empty if it has ended."""
    try:
        root = psutil.Process(pid)
        return [process for process in (root, *root.children(recursive=True)) if process.is_running()]
    except psutil.NoSuchProcess:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.NoSuchProcess:
        return 0  # it has just ended


def _peak(pid: int) -> int:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return 0  # it has just ended
    peak = re.search(r"^VmHWM:\s+(\d+) kB", status, re.MULTILINE)
    return int(peak[1]) * 1024 if peak else 0
