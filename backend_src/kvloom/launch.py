"""Starts a tritonserver of our own, waits until it answers, watches it and takes everything down again."""

import http.client
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import BinaryIO

import psutil

from kvloom import tritonserver
from kvloom.errors import LaunchError
from kvloom.health import HealthEndpoint
from kvloom.ports import Ports
from kvloom.repository import ModelRepository
from kvloom_client import Client, KvloomClientError

SHARED_MEMORY = Path("/dev/shm")
SHARED_MEMORY_MIB = 16
"""What must be free there: the two models take 1 MiB each; the rest is for prompts, at about four times their size."""

POLL_S = 0.1
KILL_GRACE_S = 5.0
MODEL_SAYS = "kvloom: ERROR kvloom.serving.llm: "
"""What the line begins with in which `llm` says why it can't start."""

LOG_TAIL_LINES = 40
LOG_TAIL_BYTES = 16384


class Server:
    """A running tritonserver. Made by ``start``; a context manager that stops it.

    Attributes:
        ports: where it listens.
        process: the tritonserver process; leads a session and process group of its own.
        shm_prefix: what the names of all its files in /dev/shm begin with.
        log_path: file with everything it and its models print; gone after the stop unless the caller named it.
    """

    process: "subprocess.Popen[bytes]"

    def __init__(self, ports: Ports, log_path: Path, exit_timeout_s: int):
        self.ports = ports
        self.log_path = log_path
        self.shm_prefix = f"kvloom-{uuid.uuid4().hex[:12]}-"
        self._exit_timeout_s = exit_timeout_s
        self._answered = False
        self._cleanup = ExitStack()

    @classmethod
    def start(
        cls,
        repository: ModelRepository,
        *,
        ports: Ports = Ports(),  # noqa: B008 - frozen
        binary: Path | None = None,
        log_file: Path | None = None,
        verbose: bool = False,
        start_timeout_s: float = 600.0,
        exit_timeout_s: int = 30,
        stop: threading.Event | None = None,
    ) -> "Server":
        """Start a server and wait until a first answer has come back.

        Args:
            repository: the models to serve.
            ports: where to listen; 0 takes any free port.
            binary: the tritonserver to start; None looks for one.
            log_file: where its output goes; None keeps it in a temporary file.
            verbose: also copy its output to stderr.
            start_timeout_s: seconds it may take to get ready.
            exit_timeout_s: seconds that requests in flight get when it is stopped.
            stop: when set, the start is given up.

        Raises:
            LaunchError: it can't be found or started, or does not get ready. Nothing is left behind.
            KeyboardInterrupt: ``stop`` was set. Nothing is left behind.
        """
        with ExitStack() as cleanup:
            workdir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="kvloom-")))
            server = cls(ports.resolved(), log_file or workdir / "tritonserver.log", exit_timeout_s)
            installation = tritonserver.find(binary, workdir)
            check_shared_memory(SHARED_MEMORY)
            repository.write(workdir / "models")
            cleanup.callback(server._remove_shared_memory)
            log = cleanup.enter_context(_open(server.log_path))
            health = HealthEndpoint(server.ports.host, server.ports.health, lambda: server.ready)
            cleanup.callback(health.close)
            if verbose:
                cleanup.callback(_follow(server.log_path))
            options = server._options(workdir / "models", installation.backends)
            server.process = _spawn([str(installation.binary), *options], installation.environment(os.environ), log)
            cleanup.callback(server._stop_processes)
            deadline = time.monotonic() + start_timeout_s
            server._wait_until(server._serves_http, deadline, stop)
            server._wait_for_canary(deadline, stop)
            server._answered = True
            server._cleanup = cleanup.pop_all()
        return server

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint."""
        return f"{self.ports.own_host}:{self.ports.grpc}"

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoint."""
        return f"http://{self.ports.own_host}:{self.ports.http}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics in Prometheus' text format."""
        return f"http://{self.ports.own_host}:{self.ports.metrics}/metrics"

    @property
    def health_url(self) -> str:
        """URL that answers 200 while the server is ready, else 503."""
        return f"http://{self.ports.own_host}:{self.ports.health}/health/ready"

    @property
    def ready(self) -> bool:
        """Whether it has answered a request and still runs."""
        return self._answered and self.process.poll() is None

    def check(self) -> None:
        """Look after the server.

        Raises:
            LaunchError: it has died; carries the end of its log.
        """
        code = self.process.poll()
        if code is not None:
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            raise self._failure(f"tritonserver ended by itself ({reason})")

    def stop(self) -> None:
        """Stop everything that was started and remove what it left; may be called again."""
        self._answered = False
        self._cleanup.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _options(self, models: Path, backends: Path) -> list[str]:
        return [
            f"--model-repository={models}",
            # explicit: a broken model can be loaded again without a restart
            "--model-control-mode=explicit",
            "--load-model=*",
            # the config is complete; completing it would load every model's Python twice
            "--disable-auto-complete-config",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--http-address={self.ports.host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={self.ports.host}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={self.ports.host}",
            f"--metrics-port={self.ports.metrics}",
            f"--allow-gpu-metrics={str(Path('/dev/nvidiactl').exists()).lower()}",
            f"--exit-timeout-secs={self._exit_timeout_s}",
        ]

    def _wait_until(self, done: Callable[[], bool], deadline: float, stop: threading.Event | None) -> None:
        while not done():
            self.check()
            if stop is not None and stop.is_set():
                raise KeyboardInterrupt
            if time.monotonic() > deadline:
                raise self._failure("tritonserver did not get ready in time")
            time.sleep(POLL_S)

    def _serves_http(self) -> bool:
        connection = http.client.HTTPConnection(self.ports.own_host, self.ports.http, timeout=5)
        try:
            connection.request("GET", "/v2/health/ready")
            return connection.getresponse().status == http.HTTPStatus.OK
        except (OSError, http.client.HTTPException):
            return False  # not listening yet
        finally:
            connection.close()

    def _wait_for_canary(self, deadline: float, stop: threading.Event | None) -> None:
        """Triton says ready also when a model can't answer; only an answer proves that it can."""
        with Client(self.grpc_url) as client, ThreadPoolExecutor(1) as pool:
            with client.stream(input_ids=[0], max_tokens=1, temperature=0.0, request_id="canary") as stream:
                answer = pool.submit(list, stream)
                self._wait_until(answer.done, deadline, stop)
            try:
                answer.result()
            except KvloomClientError as error:
                raise self._failure(f"the first request failed: {error}") from error

    def _failure(self, what: str) -> LaunchError:
        with self.log_path.open("rb") as log:
            log.seek(max(0, self.log_path.stat().st_size - LOG_TAIL_BYTES))
            lines = log.read().decode("utf-8", errors="replace").splitlines()
        said = [line.removeprefix(MODEL_SAYS) for line in lines if line.startswith(MODEL_SAYS)]
        if said:
            return LaunchError(f"llm can't be served: {said[-1]}")
        lines = lines[-LOG_TAIL_LINES:]
        return LaunchError("\n  | ".join([f"{what}; the end of its log:", *lines]))

    def _stop_processes(self) -> None:
        if self.process.poll() is None:
            # tritonserver takes its stubs down itself; a signal to the whole group would cut their last answers
            self.process.terminate()
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(self._exit_timeout_s + KILL_GRACE_S)
        # whoever is left: usually nobody
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        deadline = time.monotonic() + KILL_GRACE_S
        while _group_alive(self.process.pid) and time.monotonic() < deadline:
            time.sleep(0.01)

    def _remove_shared_memory(self) -> None:
        for path in SHARED_MEMORY.glob(f"{self.shm_prefix}*"):
            path.unlink(missing_ok=True)


def check_shared_memory(folder: Path) -> None:
    """See to it that Triton's Python backend finds the shared memory that it needs.

    Raises:
        LaunchError: too little of the file system at ``folder`` is free; says what to do.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise LaunchError(f"shared memory: {folder}: {error.strerror}; Triton's Python backend needs it") from error
    if free < SHARED_MEMORY_MIB << 20:
        raise LaunchError(
            f"shared memory: {folder} has {free / 2**20:.1f} MiB free, Triton's Python backend needs "
            f"{SHARED_MEMORY_MIB} MiB: delete what ended programs left there, or enlarge it (Docker: --shm-size=256m, "
            f"compose: shm_size, elsewhere: mount -o remount,size=256m {folder})"
        )


def _open(path: Path) -> BinaryIO:
    try:
        return path.open("wb")
    except OSError as error:
        raise LaunchError(f"log file {path}: {error.strerror}") from error


def _spawn(command: list[str], environment: dict[str, str], log: BinaryIO) -> "subprocess.Popen[bytes]":
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


def _group_alive(group: int) -> bool:
    """Whether a process of the group still runs; who is dead but not reaped by its parent does not count."""
    for process in psutil.process_iter():
        try:
            if os.getpgid(process.pid) == group and process.status() != psutil.STATUS_ZOMBIE:
                return True
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    return False


def _follow(path: Path) -> Callable[[], None]:
    """Copy what is appended to a file to stderr; returns what ends it."""
    ended = threading.Event()

    def copy() -> None:
        with path.open("rb") as log:
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
