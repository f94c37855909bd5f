"""A proxy with TLS that requires a token, like proxies in front of Triton."""

import socket
import ssl
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress


@contextmanager
def tls_proxy(context: ssl.SSLContext, target: str, token: str) -> Iterator[str]:
    """Forward connections whose first request has ``Authorization: Bearer`` with the token. Yields the address."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_accept, args=(listener, context, target, token), daemon=True).start()
    try:
        yield f"127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


def _accept(listener: socket.socket, context: ssl.SSLContext, target: str, token: str) -> None:
    with suppress(OSError):  # the listener is closed
        while True:
            threading.Thread(target=_serve, args=(listener.accept()[0], context, target, token), daemon=True).start()


def _serve(plain: socket.socket, context: ssl.SSLContext, target: str, token: str) -> None:
    with suppress(OSError):  # the client does not trust the certificate, or disconnects
        with context.wrap_socket(plain, server_side=True) as client:
            head = b""
            while b"\r\n\r\n" not in head and (data := client.recv(1 << 16)):
                head += data
            if f"authorization: bearer {token}".encode() not in head.lower():
                client.sendall(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
                socket.socket.shutdown(client, socket.SHUT_WR)
                # Read the rest of the request: a close with unread data would discard the answer
                while client.recv(1 << 16):
                    pass
                return
            host, port = target.split(":")
            with socket.create_connection((host, int(port))) as server:
                server.sendall(head)
                back = threading.Thread(target=_copy, args=(server, client), daemon=True)
                back.start()
                _copy(client, server)
                back.join()


def _copy(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    for end in (source, sink):
        with suppress(OSError):
            socket.socket.shutdown(end, socket.SHUT_RDWR)
