"""The health endpoint: /health/ready answers 200 or 503, /health/live 200 as long as the launcher runs."""

import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from kvloom.errors import LaunchError

MAX_CONNECTIONS = 64
"""Each holds a thread and a descriptor of the launcher's."""

CONNECTION_S = 10.0
"""Seconds after which a connection is broken: a peer that sends a byte now and then would hold it for hours."""


class _Server(ThreadingHTTPServer):
    """Breaks connections that last too long, and the oldest ones if there are too many."""

    # of socketserver, which takes 5: many that come at once would hold up a prober for seconds
    request_queue_size = 128

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]):
        super().__init__(address, handler)
        self._lock = threading.Lock()
        # the oldest first, each with the moment when it began
        self._connections: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread; called by http.server."""
        with self._lock:
            self._connections[request] = time.monotonic()
        self.service_actions()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection; called by http.server."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Break what has lasted too long; called by http.server several times a second."""
        late = time.monotonic() - CONNECTION_S
        with self._lock:
            excess = len(self._connections) - MAX_CONNECTIONS
            for number, (request, began) in enumerate(list(self._connections.items())):
                if number >= excess and began > late:
                    break
                del self._connections[request]
                # its thread reads the end, and closes it
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing of who breaks a connection; show a fault of ours."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class HealthEndpoint:
    """Answers GET and HEAD from a thread of its own until it is closed."""

    def __init__(self, host: str, port: int, is_ready: Callable[[], bool]):
        """Start serving.

        Args:
            host: IPv4 address to listen on.
            port: TCP port to listen on.
            is_ready: asked at every request, from any thread.

        Raises:
            LaunchError: the port can't be taken.
        """

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:  # noqa: N802 - the name is http.server's
                path = self.path.partition("?")[0]
                if path == "/health/live":
                    self._answer(HTTPStatus.OK, "live\n")
                elif path != "/health/ready":
                    self._answer(HTTPStatus.NOT_FOUND, "not found\n")
                elif is_ready():
                    self._answer(HTTPStatus.OK, "ready\n")
                else:
                    self._answer(HTTPStatus.SERVICE_UNAVAILABLE, "not ready\n")

            def do_HEAD(self) -> None:  # noqa: N802 - likewise
                self.do_GET()

            def _answer(self, status: HTTPStatus, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Say nothing: a probe every second is no news."""

        try:
            self._server = _Server((host, port), Handler)
        except OSError as error:
            raise LaunchError(f"health endpoint: port {port}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
