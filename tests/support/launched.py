"""`kvloom serve` as a separate process."""

import re
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import psutil

from support.server import SETTINGS, Footprint

KVLOOM = str(Path(sys.executable).parent / "kvloom")
READY = re.compile(
    "kvloom ready " + " ".join(rf"{name}=127\.0\.0\.1:(\d+)" for name in ("http", "grpc", "metrics", "health")) + "\n"
)


def serve(*arguments: str, settings: Mapping[str, str] = SETTINGS) -> "subprocess.Popen[str]":
    """Start `kvloom serve`, on free ports unless ``arguments`` give others."""
    assignments = [f"--set={key}={value}" for key, value in settings.items()]
    names = [name for name in ("http", "grpc", "metrics", "health") if f"--{name}-port" not in " ".join(arguments)]
    return subprocess.Popen(
        [KVLOOM, "serve", *assignments, *(f"--{name}-port=0" for name in names), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def child(serving: "subprocess.Popen[str]", but: int = 0, within: float = 30.0) -> Footprint:
    """Wait for the tritonserver that ``kvloom serve`` starts, other than the process ``but``. Returns its footprint."""
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        for process in psutil.Process(serving.pid).children():
            try:
                if process.pid != but and "shm-region-prefix-name" in " ".join(process.cmdline()):
                    return Footprint(process.pid)
            except (psutil.NoSuchProcess, psutil.ZombieProcess):
                continue
        time.sleep(0.02)
    raise AssertionError("no tritonserver was started")


def health(port: int, path: str = "/health/ready") -> int:
    """The status of a GET request to the health port."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as response:
            return response.status
    except urllib.error.HTTPError as error:
        return error.code


class Launched:
    """A `kvloom serve` that is ready.

    Attributes:
        process: its process.
        footprint: the footprint of its first tritonserver.
        struck: the messages that it should have printed about each failure so far, for tests that share it.
    """

    def __init__(self, process: "subprocess.Popen[str]"):
        """Wait until it is ready."""
        assert process.stdout is not None and process.stderr is not None
        self.process = process
        ready = READY.fullmatch(process.stdout.readline())
        assert ready, process.stderr.read()
        self.http, self.grpc, self.metrics, self.health = map(int, ready.groups())
        self.footprint = child(process)
        self.struck: list[str] = []

    @property
    def url(self) -> str:
        """The gRPC endpoint."""
        return f"127.0.0.1:{self.grpc}"

    @property
    def metrics_url(self) -> str:
        """The URL of the metrics."""
        return f"http://127.0.0.1:{self.metrics}/metrics"

    def wait_until_health_is(self, status: int, within: float) -> float:
        """Wait until the health endpoint answers with ``status``. Returns the seconds that it took."""
        start = time.monotonic()
        while health(self.health) != status:
            assert time.monotonic() - start < within, f"no {status} within {within} s"
            time.sleep(0.05)
        return time.monotonic() - start


@contextmanager
def launched(*arguments: str, settings: Mapping[str, str] = SETTINGS) -> Iterator[Launched]:
    """Run `kvloom serve`. Kills it at the end if it still runs."""
    process = serve(*arguments, settings=settings)
    try:
        yield Launched(process)
    finally:
        process.kill()
        process.communicate()
