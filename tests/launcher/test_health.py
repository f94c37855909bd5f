"""The health endpoint, asked by probers, proxies and passers-by."""

import http.client
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from kvloom.launcher import health
from kvloom.launcher.health import HealthEndpoint
from support.server import eventually


class Endpoint:
    """One whose server is ready or not, as the test says."""

    def __init__(self) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.ready = True
        self._endpoint = HealthEndpoint("127.0.0.1", self.port, lambda: self.ready)
        self.close = self._endpoint.close

    def ask(self, method: str, path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        try:
            connection.request(method, path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def send(self, sent: bytes, reset: bool = False) -> bytes:
        """What comes back for these bytes; ``reset``: the connection is broken instead of being read."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=30) as connection:
            connection.sendall(sent)
            if reset:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
                return b""
            connection.shutdown(socket.SHUT_WR)
            return b"".join(iter(lambda: connection.recv(65536), b""))


@pytest.fixture
def endpoint() -> Iterator[Endpoint]:
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.mark.parametrize("query", ["", "?", "?x=1", "?a=/health/live"])
def test_ready_and_live(endpoint, query):
    assert endpoint.ask("GET", f"/health/ready{query}") == (200, b"ready\n")
    assert endpoint.ask("HEAD", f"/health/ready{query}") == (200, b"")
    assert endpoint.ask("GET", f"/health/live{query}") == (200, b"live\n")
    endpoint.ready = False
    assert endpoint.ask("GET", f"/health/ready{query}") == (503, b"not ready\n")
    assert endpoint.ask("HEAD", f"/health/ready{query}") == (503, b"")
    assert endpoint.ask("GET", f"/health/live{query}") == (200, b"live\n")
    assert endpoint.ask("HEAD", f"/health{query}") == (404, b"")


def test_nothing_that_comes_prints_a_traceback(endpoint, capfd):
    for method in ("OPTIONS", "POST", "TRACE", "BREW"):
        assert endpoint.ask(method, "/health/ready")[0] == 501
    garbage = [
        b"",
        b"\n",
        b"\x16\x03\x01\x02\x00\x01",
        b"GET / HTTP/9.9\r\n\r\n",
        b"GET /" + b"x" * 70_000,
        b"\xff" * 100,
    ]
    garbage += [b"GET http://[ HTTP/1.1\r\n\r\n", b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 200 + b"\r\n"]
    for sent in garbage:
        endpoint.send(sent)
    for _ in range(20):
        for sent in (b"", b"GET /hea", b"GET /health/ready HTTP/1.1\r\n\r\n"):
            endpoint.send(sent, reset=True)
    # an answer comes after everything before it was taken
    assert endpoint.ask("GET", "/health/ready") == (200, b"ready\n")
    endpoint.close()
    assert capfd.readouterr() == ("", "")


def test_peers_that_say_nothing_take_no_threads_from_others(endpoint, monkeypatch, capfd):
    monkeypatch.setattr(health, "CONNECTION_S", 600.0)
    before = threading.active_count()
    silent = [socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) for _ in range(300)]
    for connection in silent[::2]:
        connection.sendall(b"GET /health/rea")
    assert endpoint.ask("GET", "/health/ready") == (200, b"ready\n")
    # the oldest have been cut off; their threads end
    assert silent[0].recv(1) == b""
    eventually(lambda: threading.active_count() - before <= health.MAX_CONNECTIONS)
    for connection in silent:
        connection.close()
    endpoint.close()
    assert capfd.readouterr() == ("", "")


def test_a_peer_that_sends_a_byte_now_and_then_is_cut_off(endpoint, monkeypatch):
    monkeypatch.setattr(health, "CONNECTION_S", 0.5)
    with socket.create_connection(("127.0.0.1", endpoint.port), timeout=30) as connection:
        with pytest.raises((ConnectionResetError, BrokenPipeError)):
            for byte in b"GET /health/ready?" + b"x" * 600:
                connection.sendall(bytes([byte]))
                time.sleep(0.05)
    assert endpoint.ask("GET", "/health/ready") == (200, b"ready\n")
