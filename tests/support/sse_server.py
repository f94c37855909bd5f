"""A small HTTP server with Triton's generate protocol, whose replies, also malformed ones, the test sets."""

import json
import socketserver
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Exchange:
    """A request at the server, for the script that answers it.

    Attributes:
        path: the request's path.
        body: the request's JSON.
        left: set when the client has disconnected.
    """

    def __init__(self, handler: BaseHTTPRequestHandler, body: dict):
        self.path = handler.path
        self.body = body
        self.left = threading.Event()
        self._handler = handler

    def head(self, status: int = 200, kind: str = "text/event-stream; charset=utf-8") -> None:
        self._handler.send_response(status)
        self._handler.send_header("Content-Type", kind)
        self._handler.send_header("Transfer-Encoding", "chunked")
        self._handler.end_headers()

    def send(self, content: bytes) -> None:
        self._handler.wfile.write(b"%x\r\n%s\r\n" % (len(content), content))

    def event(self, **outputs: object) -> None:
        self.send(b"data: " + json.dumps(outputs, ensure_ascii=False).encode() + b"\n\n")

    def end(self) -> None:
        self._handler.wfile.write(b"0\r\n\r\n")

    def wait_until_left(self, within: float = 5.0) -> None:
        """Block until the client closes the connection."""
        self._handler.connection.settimeout(within)
        assert self._handler.connection.recv(1) == b""
        self.left.set()


class SseServer(ThreadingHTTPServer):
    """Answers each request with the next script, and records the exchanges. Listens on a free port."""

    daemon_threads = True

    def __init__(self, *scripts: Callable[[Exchange], None]):
        self.exchanges: list[Exchange] = []
        todo = list(scripts)

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                server.exchanges.append(exchange := Exchange(self, body))
                todo.pop(0)(exchange)
                self.close_connection = True

            def log_message(self, *_: object) -> None:
                pass

        server = self
        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"127.0.0.1:{self.server_port}"

    def handle_error(self, request: object, client_address: object) -> None:
        pass  # clients in these tests disconnect

    def __enter__(self) -> "SseServer":
        threading.Thread(target=self.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *error: object) -> None:
        self.shutdown()
        socketserver.TCPServer.server_close(self)
