"""The HTTP client for synchronous and threaded programs. It uses Triton's generate endpoints."""

import json
import socket
import threading
from collections.abc import Generator, Iterator, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Unpack
from urllib.parse import quote

import httpx2 as httpx

from kvloom_client.answer import Answer, Reply, chunk_of, join
from kvloom_client.connection import Connection, Tls
from kvloom_client.errors import (
    AnswerTimeout,
    ServerError,
    access_denied,
    connection_error,
    request_error,
)
from kvloom_client.request import Request, RequestArguments, build_request
from kvloom_client.sse import events
from kvloom_client.stream import Stream

CLOSING_S = 1.0
"""Maximum seconds to wait until the server closes a stream that has ended."""


class HttpClient:
    """Sends requests to the ``generate`` model of one tritonserver over HTTP.

    Many threads may use one client at once. Every request has a separate connection.
    """

    def __init__(self, url: str, *, tls: Tls | bool = False, headers: Mapping[str, str] | None = None):
        """Create a client. It connects with the first request.

        Args:
            url: ``host:port`` of Triton's HTTP endpoint or of a proxy for it, whose path may follow;
                ``https://host:port`` for TLS.
            tls: how to encrypt; True for TLS with the certificates that the system trusts.
            headers: headers of every call, such as ``{"authorization": "Bearer ..."}``.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        connection = Connection.parse(url, tls, headers or {})
        self.url = url
        self._client = httpx.Client(
            base_url=connection.base_url,
            headers=connection.headers,
            # One connection per request, because a cancel breaks it and an idle connection may be dead
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # No proxy from the environment, which would also be used for 127.0.0.1
            trust_env=False,
            # Plain HTTP needs no certificates; loading them takes 20 ms
            verify=connection.ssl_context() or False,
        )

    def stream(self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]) -> Stream:
        """Request an answer and receive its chunks as they come. The first ``next`` sends the request.

        Args:
            timeout: maximum seconds for the whole answer including retries, from the first ``next``; None for no limit.
            retries: maximum number of retries. A request is retried only if that is safe: no part of the answer has
                arrived, and there was no connection or the server refused the request as UNAVAILABLE. The pauses grow
                from 0.1 s to 5 s.
            request: the prompt, sampling keys and options, see RequestArguments.

        Raises:
            InvalidArgument: the request can't be sent. All other errors are raised while iterating.
        """
        return self._send(build_request(stream=True, **_defaults(request)), "generate_stream", timeout, retries)

    def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Request an answer and wait for all of it. The arguments are those of ``stream``.

        Triton does not notice when a client disconnects from this endpoint, so the server continues after a
        ``timeout``. Give ``deadline_ms`` too, or use ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive completely.
        """
        with self._send(build_request(stream=False, **_defaults(request)), "generate", timeout, retries) as stream:
            return join(list(stream))

    def close(self) -> None:
        """Close the client. All answers must have ended or been cancelled."""
        self._client.close()

    def __enter__(self) -> "HttpClient":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, request: Request, endpoint: str, timeout: float | None, retries: int) -> Stream:
        path = f"/v2/models/{quote(request.model, safe='')}/{endpoint}"
        body = json.dumps({"id": request.id, **request.fields}).encode()
        return Stream(
            lambda left: _Call(self._client, self.url, path, body, left), request.id, self.url, timeout, retries
        )


class _Call(Iterator[Reply]):
    """One attempt over HTTP."""

    def __init__(self, client: httpx.Client, url: str, path: str, body: bytes, timeout: float | None):
        self._client = client
        self._url = url
        self._path = path
        self._body = body
        self._timeout = timeout
        self._socket: socket.socket | None = None
        self._broken_off = False
        self._timed_out = False
        self._replies = self._exchange()

    def __next__(self) -> Reply:
        try:
            return next(self._replies)
        except httpx.TransportError as error:
            if self._timed_out or isinstance(error, httpx.ConnectTimeout):
                raise self._too_late() from error
            sent = not isinstance(error, httpx.ConnectError)
            tls = not sent and "SSL" in str(error)
            raise connection_error(self._url, "HTTP", str(error), sent=sent, tls=tls) from error

    def cancel(self) -> None:
        self._break_off()
        try:
            self._replies.close()
        except ValueError:
            return  # another thread reads the replies; its read fails and it closes them

    def _exchange(self) -> Generator[Reply]:
        limit = threading.Timer(self._timeout or 0, self._expire)
        limit.daemon = True  # a program may end before its answers have ended
        if self._timeout is not None:
            limit.start()
        try:
            with self._client.stream(
                "POST",
                self._path,
                content=self._body,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                # A timeout per read would not bound the whole answer; the timer does
                timeout=httpx.Timeout(None, connect=self._timeout),
                extensions={"trace": self._trace},
            ) as response:
                yield from self._read(response)
        finally:
            limit.cancel()

    def _read(self, response: httpx.Response) -> Iterator[Reply]:
        # An error of the model before the first part of the answer is an event, too, with status 400
        if response.headers.get("content-type", "").startswith("text/event-stream"):
            received = response.iter_raw()
            for data in events(received):
                reply = _decode(data, response.status_code, self._url)
                if reply.final:
                    self._drain(received)
                yield reply
        else:
            body = response.read()
            self._check_time()
            yield _decode(body, response.status_code, self._url)
        self._check_time()

    def _drain(self, received: Iterator[bytes]) -> None:
        """Let the server close the stream, for a limited time: the answer is complete."""
        limit = threading.Timer(CLOSING_S, self._break_off)
        limit.start()
        try:
            for _ in received:
                pass
        except httpx.TransportError:
            return
        finally:
            limit.cancel()

    def _trace(self, event: str, info: dict[str, Any]) -> None:
        # With TLS, the second event's socket replaces the first one's
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._broken_off:
                self._break_off()

    def _break_off(self) -> None:
        """Make a read in another thread return. Only that thread may close the socket."""
        self._broken_off = True
        if self._socket is not None:
            with suppress(OSError):  # it is closed already
                # The plain socket's method: SSLSocket.shutdown drops the encryption while another thread still reads
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _expire(self) -> None:
        self._timed_out = True
        self._break_off()

    def _check_time(self) -> None:
        # If a body ends with its connection, a timeout looks like the end of the body
        if self._timed_out:
            raise self._too_late()

    def _too_late(self) -> AnswerTimeout:
        return AnswerTimeout(f"{self._url}: the answer was not complete within the timeout")


def _decode(body: str | bytes, status: int, url: str) -> Reply:
    """Decode a response.

    Raises:
        RequestFailed: the response is an error of the server, which is the last response.
    """
    try:
        outputs = json.loads(body)
    except ValueError:
        outputs = None
    if isinstance(outputs, dict) and "error" in outputs:
        raise request_error(str(outputs["error"]))
    if status in (401, 403):
        raise access_denied(url, f"HTTP {status}")
    if status != 200 or not isinstance(outputs, dict):
        shown = body[:200] if isinstance(body, str) else body[:200].decode("utf-8", errors="replace")
        raise ServerError(f"HTTP {status} without an answer; check that it is Triton's HTTP port: {shown!r}")
    try:
        chunk = chunk_of(outputs)
    except ValueError as error:
        raise ServerError(f"can't read the server's response; check that the model is kvloom's: {error}") from error
    return Reply(chunk, chunk.finish_reason is not None)


def _defaults(request: RequestArguments) -> RequestArguments:
    return {"model": "generate", **request}
