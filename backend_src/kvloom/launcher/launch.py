"""Starts a tritonserver, waits until it answers, monitors it and stops it."""

import http.client
import logging
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType

import psutil

from kvloom.admin import digests
from kvloom.errors import LaunchError
from kvloom.launcher import access, tritonserver
from kvloom.launcher.ports import Ports, in_brackets
from kvloom.launcher.processes import SHARED_MEMORY, Guard, alive, kill_group, remove_shared_memory, spawn, stubs_of
from kvloom.launcher.repository import ModelRepository
from kvloom.launcher.runfolder import run_folder
from kvloom.launcher.serverlog import ServerLog, to_log, to_stderr
from kvloom.launcher.stacks import deep_stacks
from kvloom.progress import phase
from kvloom_client import Client, KvloomClientError

log = logging.getLogger(__name__)

SHARED_MEMORY_MIB = 16
"""Shared memory that must be free. The two models take 1 MiB each. Prompts need about four times their size."""

POLL_S = 0.1
UNLOAD_S = 4.0
"""Seconds of the exit timeout that are reserved for unloading: the models take 2, and Triton checks once a second. If
all answers have ended, Triton gets no more, because a request that it has miscounted would delay it to the last
second."""

DRAINED = {"llm", "generate"}
"""Models that have no work left after `llm` is drained. Other models in the repository may have some."""

LEAST_UNLOAD_S = 1.0
"""Minimum seconds for unloading. A kill after that harms no client: all answers have ended."""


class Server:
    """A running tritonserver, created by ``start``. A context manager that stops it.

    Attributes:
        ports: the ports that it listens on, except the health port.
        process: the tritonserver process, which leads its own session and process group.
        shm_prefix: the prefix of the names of all its files in /dev/shm.
    """

    process: "subprocess.Popen[bytes]"

    def __init__(self, ports: Ports, server_log: ServerLog, exit_timeout_s: int, shared_memory: bool):
        self.ports = ports
        self._shared_memory = shared_memory
        self.shm_prefix = f"kvloom-{uuid.uuid4().hex[:12]}-"
        self._log = server_log
        self._exit_timeout_s = exit_timeout_s
        self._admin_token = secrets.token_urlsafe()
        self._stubs: dict[str, psutil.Process] = {}
        self._answered = False
        self._guard: Guard | None = None
        self._cleanup = ExitStack()

    @classmethod
    def start(
        cls,
        repository: ModelRepository,
        *,
        ports: Ports = Ports(),  # noqa: B008 - frozen
        binary: Path | None = None,
        log_file: Path | None = None,
        run_dir: Path | None = None,
        verbose: bool = False,
        shared_memory: bool = False,
        start_timeout_s: float = 600.0,
        exit_timeout_s: int = 30,
        stop: threading.Event | None = None,
    ) -> "Server":
        """Start a server and wait for its first answer. Logs the phases of the start.

        Args:
            repository: the models to serve.
            ports: the ports to listen on; 0 takes any free port.
            binary: the tritonserver to start; None to look for one.
            log_file: the file for its output; None for a file in ``run_dir``.
            run_dir: a folder for files that the next server needs, like the conversations' journal; None if there is no
                next server.
            verbose: also copy its output to stderr.
            shared_memory: let clients register shared memory, see `access`.
            start_timeout_s: maximum seconds until it is ready.
            exit_timeout_s: maximum seconds that a stop takes, most of them for running answers.
            stop: aborts the start when it is set.

        Raises:
            LaunchError: it can't be found or started, or does not become ready. Everything is cleaned up.
            KeyboardInterrupt: ``stop`` was set. Everything is cleaned up.
        """
        with ExitStack() as cleanup:
            run_dir = run_dir or Path(cleanup.enter_context(run_folder()))
            workdir = Path(cleanup.enter_context(tempfile.TemporaryDirectory(prefix="server-", dir=run_dir)))
            ports = ports.resolved()
            installation = tritonserver.find(binary, workdir)
            check_shared_memory(SHARED_MEMORY)
            server_log = ServerLog(log_file or run_dir / "tritonserver.log")
            file = cleanup.enter_context(server_log.file)
            server = cls(ports, server_log, exit_timeout_s, shared_memory)
            journal = run_dir / "journal"
            repository.write(
                workdir / "models",
                # Digests, because Triton shows the settings to every client
                admin_token=digests(repository.settings.admin_token, server._admin_token),
                journal_dir=repository.settings.journal_dir or str(journal),
            )
            cleanup.callback(server._dismiss_guard)
            cleanup.callback(remove_shared_memory, server.shm_prefix)
            unfollow = server_log.follow(to_stderr if verbose else to_log)
            cleanup.callback(unfollow)
            options = server._options(workdir / "models", installation.backends)
            phase("starting tritonserver")
            with deep_stacks():
                server.process = spawn([str(installation.binary), *options], installation.environment(os.environ), file)
            cleanup.callback(server._end_processes)
            server._guard = Guard(server.process.pid, server.shm_prefix, run_dir)
            deadline = time.monotonic() + start_timeout_s
            server._wait_until(server._serves_http, deadline, stop)
            phase("waiting for the first answer")
            server._wait_for_canary(deadline, stop)
            if not verbose:
                unfollow()
            server._stubs = stubs_of(server.process.pid)
            server._answered = True
            server._cleanup = cleanup.pop_all()
        return server

    @property
    def grpc_url(self) -> str:
        """``host:port`` of the gRPC endpoint."""
        return self.ports.own_address("grpc")

    @property
    def http_url(self) -> str:
        """Base URL of the HTTP endpoint."""
        return f"http://{self.ports.own_address('http')}"

    @property
    def metrics_url(self) -> str:
        """URL of the metrics in Prometheus's text format."""
        return f"http://{self.ports.own_address('metrics')}/metrics"

    @property
    def ready(self) -> bool:
        """Whether it has answered a request and all of its processes run. Any thread may call this."""
        return self._answered and self._ended() is None

    def check(self) -> None:
        """Check that all processes of the server run.

        Raises:
            LaunchError: a process has ended. The message contains the end of the log.
        """
        ended = self._ended()
        if ended is not None:
            raise self.failure(ended)

    def failure(self, what: str) -> LaunchError:
        """An error whose message contains the end of the log."""
        return self._log.failure(what, starting=not self._answered)

    def stop(self) -> None:
        """Let running answers finish, then stop everything and clean up. May be called again."""
        self._cleanup.close()

    def kill(self) -> None:
        """Stop everything at once and clean up. Connections break, so that clients get an error."""
        self._answered = False
        self._cleanup.close()

    def __enter__(self) -> "Server":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _ended(self) -> str | None:
        """A message that says which process has ended; None if all run."""
        code = self.process.poll()
        if code is not None:
            reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            return f"tritonserver has ended ({reason})"
        for model, process in self._stubs.items():
            if not alive(process):
                return f"the process of the model {model} has ended"
        return None

    def _options(self, models: Path, backends: Path) -> list[str]:
        # libevent's notation, which Triton passes on
        http_host = f"ipv6:{self.ports.host}" if ":" in self.ports.host else self.ports.host
        return [
            f"--model-repository={models}",
            *access.options(self._shared_memory),
            # The config is complete; auto-completion would load every model's Python twice
            "--disable-auto-complete-config",
            f"--backend-directory={backends}",
            f"--backend-config=python,shm-region-prefix-name={self.shm_prefix}",
            f"--http-address={http_host}",
            f"--http-port={self.ports.http}",
            f"--grpc-address={in_brackets(self.ports.host)}",
            f"--grpc-port={self.ports.grpc}",
            f"--metrics-address={http_host}",
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
                raise self.failure("tritonserver did not become ready in time")
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
        """Wait for an answer, because Triton is also ready if a model can't answer."""
        with Client(self.grpc_url) as client, ThreadPoolExecutor(1) as pool:
            with client.stream(input_ids=[0], max_tokens=1, temperature=0.0, request_id="canary") as stream:
                answer = pool.submit(list, stream)
                self._wait_until(answer.done, deadline, stop)
            try:
                answer.result()
            except KvloomClientError as error:
                raise self.failure(f"the first request failed: {error}") from error

    def _end_processes(self) -> None:
        if self.ready:
            deadline = time.monotonic() + self._exit_timeout_s
            drained = self._drain()
            self._answered = False
            # tritonserver stops its stubs itself; a signal to the whole group would lose their last responses
            self.process.terminate()
            left_s = max(deadline - time.monotonic(), LEAST_UNLOAD_S)
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(min(left_s, UNLOAD_S) if drained and self._stubs.keys() <= DRAINED else left_s)
        # Usually no process is left
        kill_group(self.process)

    def _drain(self) -> bool:
        """Let the running answers finish. When Triton unloads, no request reaches `llm`, not even a cancel.

        Returns:
            Whether all have ended.
        """
        timeout_s = max(self._exit_timeout_s - UNLOAD_S, self._exit_timeout_s / 2)
        try:
            with Client(self.grpc_url) as client:
                client.control(
                    "drain", admin_token=self._admin_token, timeout_s=timeout_s, timeout=timeout_s + UNLOAD_S / 2
                )
        except KvloomClientError as error:
            log.warning("kvloom: could not end the running answers before the stop: %s", error)
            return False
        return True

    def _dismiss_guard(self) -> None:
        if self._guard is not None:
            self._guard.dismiss()


def check_shared_memory(folder: Path) -> None:
    """Check that there is enough shared memory for Triton's Python backend.

    Raises:
        LaunchError: too little of the file system at ``folder`` is free. The message says what to do.
    """
    try:
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise LaunchError(f"shared memory: {folder}: {error.strerror}; Triton's Python backend needs it") from error
    if free < SHARED_MEMORY_MIB << 20:
        raise LaunchError(
            f"shared memory: {folder} has {free / 2**20:.1f} MiB free, Triton's Python backend needs "
            f"{SHARED_MEMORY_MIB} MiB: delete files of ended programs there, or enlarge it (Docker: --shm-size=256m, "
            f"compose: shm_size, elsewhere: mount -o remount,size=256m {folder})"
        )
