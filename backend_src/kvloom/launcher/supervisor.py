"""Keeps a tritonserver running: restarts it on the same ports if it has ended, hangs or can't answer."""

import dataclasses
import sys
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any

from kvloom.errors import LaunchError
from kvloom.launcher.grpc_watch import GrpcWatch
from kvloom.launcher.health import HealthEndpoint
from kvloom.launcher.heartbeat import Heartbeat
from kvloom.launcher.launch import Server
from kvloom.launcher.ports import Ports
from kvloom.launcher.repository import ModelRepository
from kvloom.launcher.runfolder import run_folder
from kvloom.launcher.starting import shown

LOOK_S = 0.5
STABLE_S = 60.0
"""After this many seconds of serving, earlier failures no longer count."""

PAUSES_S = (0.0, 1.0, 2.0, 5.0, 10.0)
"""Seconds to wait before the restart after the first, second, ... failure in a row."""

MAX_FAILED_STARTS = 5
"""The supervisor gives up after this many failed starts in a row."""


class Supervisor:
    """Runs a tritonserver, restarts it if it fails, and runs the health endpoint all the time.

    A context manager: entering it starts the first server and waits for its first answer. Leaving it lets running
    answers finish and stops everything.

    Attributes:
        ports: the ports of all servers.
        recoveries: how often the server was restarted.
    """

    def __init__(
        self, repository: ModelRepository, *, ports: Ports, stop: threading.Event, verbose: bool = False, **options: Any
    ):
        """Choose the ports.

        Args:
            repository: the models to serve.
            ports: the ports to listen on; 0 takes any free port.
            stop: when it is set, ``watch`` returns and a start is aborted.
            verbose: copy the servers' output to stderr.
            options: options of ``Server.start``.

        Raises:
            LaunchError: a port is in use.
        """
        self.ports = ports.resolved()
        self.recoveries = 0
        self._repository = repository
        self._stop = stop
        self._options = {**options, "verbose": verbose}
        self._server: Server | None = None
        self._serving = False
        self._failures = 0
        self._cleanup = ExitStack()

    @property
    def ready(self) -> bool:
        """Whether the server works and accepts requests. Any thread may call this."""
        server = self._server
        return self._serving and server is not None and server.ready

    def watch(self) -> None:
        """Monitor the server until ``stop`` is set, and restart it whenever it fails.

        Raises:
            LaunchError: it does not become ready again.
        """
        while not self._stop.wait(LOOK_S):
            try:
                self._look()
            except LaunchError as error:
                self._recover(error)

    def __enter__(self) -> "Supervisor":
        with ExitStack() as cleanup:
            self._run_dir = Path(cleanup.enter_context(run_folder()))
            health = HealthEndpoint(self.ports.host, self.ports.health, lambda: self.ready)
            cleanup.callback(health.close)
            cleanup.callback(self._stop_server)
            self._start()
            self._cleanup = cleanup.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._cleanup.close()

    def _start(self) -> None:
        # The health endpoint holds the health port
        ports = dataclasses.replace(self.ports, health=0)
        with shown(plain=self._options["verbose"]):
            self._server = Server.start(
                self._repository, ports=ports, run_dir=self._run_dir, stop=self._stop, **self._options
            )
        self._began = time.monotonic()
        stuck_after_s = self._repository.settings.stuck_after_s
        self._heartbeat = Heartbeat(self.ports.own_host, self.ports.http, stuck_after_s)
        self._grpc_watch = GrpcWatch(f"{self.ports.own_host}:{self.ports.grpc}")
        self._serving = True

    def _look(self) -> None:
        assert self._server is not None
        self._server.check()
        problem = self._heartbeat.look() or self._grpc_watch.look(self._heartbeat.answered)
        if problem is not None:
            raise self._server.failure(problem)
        self._serving = not self._heartbeat.draining

    def _recover(self, failure: LaunchError) -> None:
        """Replace the server. If ``stop`` is set in the meantime, return without a server."""
        failed_at = time.monotonic()
        if failed_at - self._began > STABLE_S:
            self._failures = 0
        self._kill_server()
        for _ in range(MAX_FAILED_STARTS):
            self._failures += 1
            pause_s = PAUSES_S[min(self._failures, len(PAUSES_S)) - 1]
            _say(f"{failure}")
            _say(f"restarting tritonserver{f' in {pause_s:.0f} s' if pause_s else ''}")
            if self._stop.wait(pause_s):
                return
            try:
                self._start()
            except LaunchError as error:
                failure = error
            except KeyboardInterrupt:
                if self._stop.is_set():
                    return
                raise
            else:
                self.recoveries += 1
                _say(f"serving again {time.monotonic() - failed_at:.1f} s after the failure was detected")
                return
        raise LaunchError(f"gave up after {MAX_FAILED_STARTS} failed starts; the last error: {failure}")

    def _kill_server(self) -> None:
        """Kill the server at once, so that clients' connections break instead of hanging."""
        self._serving = False
        server, self._server = self._server, None
        if server is not None:
            server.kill()
            self._heartbeat.close()
            self._grpc_watch.close()

    def _stop_server(self) -> None:
        self._serving = False
        server, self._server = self._server, None
        if server is not None:
            server.stop()
            self._heartbeat.close()
            self._grpc_watch.close()


def _say(text: str) -> None:
    print(f"kvloom: {text}", file=sys.stderr, flush=True)
