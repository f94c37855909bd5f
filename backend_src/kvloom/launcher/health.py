"""The health endpoint. /health/ready answers 200 or 503; /health/live answers 200 while the launcher runs."""

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
from kvloom.launcher.ports import family

MAX_CONNECTIONS = 64
"""Maximum number of open connections. Each takes a thread and a descriptor of the launcher."""

CONNECTION_S = 10.0
"""Seconds after which a connection is closed. A client that sends a byte from time to time could keep it for hours."""


class _Server(ThreadingHTTPServer):
    """Closes connections that last too long, and the oldest ones if there are too many."""

    # socketserver's attribute. Its default of 5 delays probes by seconds if many clients connect at once
    request_queue_size = 128

    def __init__(self, host: str, port: int, handler: type[BaseHTTPRequestHandler]):
        self.address_family = family(host)
        super().__init__((host, port), handler)
        self._lock = threading.Lock()
        # When each connection began, the oldest first
        self._connections: dict[Any, float] = {}

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer in a thread. http.server calls it."""
        with self._lock:
            self._connections[request] = time.monotonic()
        self.service_actions()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        """Close a connection. http.server calls it."""
        with self._lock:
            self._connections.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Close what has lasted too long. http.server calls it several times a second."""
        late = time.monotonic() - CONNECTION_S
        with self._lock:
            excess = len(self._connections) - MAX_CONNECTIONS
            for number, (request, began) in enumerate(list(self._connections.items())):
                if number >= excess and began > late:
                    break
                del self._connections[request]
                # Its thread reads the end and closes it
                with suppress(OSError):
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Show faults, but not broken connections."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


class HealthEndpoint:
    """Answers GET and HEAD requests in a separate thread until it is closed."""

    def __init__(self, host: str, port: int, is_ready: Callable[[], bool]):
        """Start serving.

        Args:
            host: IPv4 or IPv6 address to listen on.
            port: TCP port to listen on.
            is_ready: called for every request, from any thread.

        Raises:
            LaunchError: the port is not free.
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

            def do_HEAD(self) -> None:  # noqa: N802 - the name is http.server's
                self.do_GET()

            def _answer(self, status: HTTPStatus, text: str) -> None:
                self.send_response(status)
                self.send_header("Content-Type", "text/plain; charset=utf-8")
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(text.encode())

            def log_message(self, format: str, *args: object) -> None:
                """Log nothing: probes come every second."""

        try:
            self._server = _Server(host, port, Handler)
        except OSError as error:
            raise LaunchError(f"health endpoint: port {port}: {error.strerror}") from error
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="health", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop serving and free the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
