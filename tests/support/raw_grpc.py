"""gRPC calls without the gRPC library, which refuses to send invalid headers."""

import socket
import struct


def spoken(address: str, sent: bytes) -> bytes:
    """Send bytes to a server. Returns its reply, which ends after half a second of silence."""
    host, port = address.split(":")
    heard = b""
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(sent)
        try:
            while data := connection.recv(1 << 16):
                heard += data
                connection.settimeout(0.5)
        except TimeoutError:
            pass
    return heard


def raw_grpc_call(path: str, *more: tuple[str, str]) -> bytes:
    """The bytes of a call with an empty message: HTTP/2 frames (RFC 9113), headers as literals (RFC 7541)."""
    headers = [(":method", "POST"), (":scheme", "http"), (":path", path), (":authority", "here"), ("te", "trailers")]
    headers += [("content-type", "application/grpc"), *more]

    def literal(text: str) -> bytes:
        assert len(text) < 127
        return bytes([len(text)]) + text.encode()

    def frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
        return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload

    block = b"".join(b"\x00" + literal(name) + literal(value) for name, value in headers)
    return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(4, 0, 0, b"") + frame(1, 4, 1, block) + frame(0, 1, 1, bytes(5))
