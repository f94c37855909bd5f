"""Settings, checks and metrics for tests with a real tritonserver."""

import json
import os
import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

import psutil

from kvloom.launcher.launch import Server
from kvloom_client import Client

SETTINGS = {"weights": "fp32", "block_size": "16", "kv_blocks": "512", "max_queue": "256", "threads": "1"}
"""fp32, so that greedy answers equal the reference. One thread, because a step with several threads waits for the
slowest at every operation, which takes many times as long on a busy machine."""

REFERENCE = json.loads((Path(__file__).parent / "data" / "greedy.json").read_text())["prompts"]
"""Greedy answers of the default model from the transformers library: name, prompt, prompt_ids, ids, text."""

IDLE_FOR_S = 0.3
"""The server must be idle for this long, because the metrics are up to 0.2 s old."""


def canary(server: Server) -> None:
    """Check that the server still gives a correct answer."""
    expected = REFERENCE[0]
    with Client(server.grpc_url) as client:
        answer = client.generate(text_input=expected["prompt"], max_tokens=16, temperature=0.0, timeout=60)
    assert list(answer.token_ids) == expected["ids"][:16]


class Measured(Protocol):
    """A server with kvloom's metrics."""

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics."""


def metrics(server: Measured) -> dict[str, float]:
    """kvloom's metrics: names with labels, as printed, to values."""
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        lines = response.read().decode().splitlines()
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if line.startswith("kvloom_"))}


def eventually(check: Callable[[], bool], within: float = 30.0) -> None:
    """Wait until ``check()`` is true, for at most ``within`` seconds."""
    deadline = time.monotonic() + within
    while not check():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.05)


def assert_idle(server: Measured, within: float = 30.0, conversations: bool = False) -> None:
    """Wait until no request runs or waits, and no block is used. With ``conversations``, they may use blocks."""
    names = ["kvloom_requests_running", "kvloom_requests_waiting"]
    if not conversations:
        names += ["kvloom_conversations", 'kvloom_blocks{state="used"}']
    deadline = time.monotonic() + within
    idle_since = None
    while True:
        now = time.monotonic()
        seen = metrics(server)
        busy = {name: seen[name] for name in names if seen[name] != 0}
        if busy:
            idle_since = None
        elif idle_since is None:
            idle_since = now
        elif now - idle_since >= IDLE_FOR_S:
            return
        assert now < deadline, f"not idle after {within} s: {busy}"
        time.sleep(0.1)


class Footprint:
    """A tritonserver's processes and its files in shared memory."""

    def __init__(self, pid: int):
        """Find the group and the prefix of a running tritonserver with this process id."""
        self.group = pid
        found = re.search(r"shm-region-prefix-name=(\S+)", " ".join(psutil.Process(pid).cmdline()))
        assert found is not None
        self.prefix = found[1]

    def processes(self) -> list[str]:
        """The group's processes that run, including the stubs."""
        live = []
        for process in psutil.process_iter():
            try:
                if os.getpgid(process.pid) == self.group and process.status() != psutil.STATUS_ZOMBIE:
                    live.append(f"{process.pid} {process.name()}")
            except (ProcessLookupError, psutil.NoSuchProcess):
                continue
        return live

    def shared_memory(self) -> list[str]:
        """Its files in /dev/shm."""
        return [name for name in os.listdir("/dev/shm") if name.startswith(self.prefix)]

    def assert_gone(self) -> None:
        """Check that no process and no file is left."""
        assert self.processes() == []
        assert self.shared_memory() == []
