"""The HTTP client, for plain and threaded programs: Triton's generate endpoints, without gRPC."""

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
"""Seconds that a server gets to close a stream that has ended."""


class HttpClient:
    """Talks to the ``generate`` model of one tritonserver over HTTP.

    One client may be used by many threads at once; every request has a connection of its own.
    """

    def __init__(self, url: str, *, tls: Tls | bool = False, headers: Mapping[str, str] | None = None):
        """Connects with the first request.

        Args:
            url: ``host:port`` of Triton's HTTP endpoint, or of a proxy in front of it, whose path may follow;
                ``https://host:port`` is encrypted.
            tls: how to encrypt; True: with the certificates that the system trusts.
            headers: sent with every call, such as ``{"authorization": "Bearer ..."}``.

        Raises:
            InvalidArgument: one of these can't be used.
        """
        connection = Connection.parse(url, tls, headers or {})
        self.url = url
        self._client = httpx.Client(
            base_url=connection.base_url,
            headers=connection.headers,
            # one connection for one request: a cancel breaks its connection off, and one that idled may be dead
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
            # the caller's address is meant as it is; a proxy from the environment would swallow 127.0.0.1
            trust_env=False,
            # plain HTTP needs no certificates; loading them takes 20 ms
            verify=connection.ssl_context() or False,
        )

    def stream(self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]) -> Stream:
        """Ask for an answer and get its chunks as they come. The request goes out with the first ``next``.

        Args:
            timeout: seconds for the whole answer, retries included, from the first ``next``; None waits for ever.
            retries: how often to ask again where that is safe: nothing of the answer has arrived, and there was no
                connection or the server refused the request as UNAVAILABLE. Pauses grow from 0.1 s to 5 s.
            request: the prompt and how to sample, see RequestArguments.

        Raises:
            InvalidArgument: at once, when the request can't be sent; everything else is raised while iterating.
        """
        return self._send(build_request(stream=True, **_defaults(request)), "generate_stream", timeout, retries)

    def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Ask for an answer and wait for all of it; the arguments are those of ``stream``.

        Triton does not notice when a client leaves this endpoint: the server works on after a ``timeout``. Give
        ``deadline_ms`` too, or use ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive, or not whole.
        """
        with self._send(build_request(stream=False, **_defaults(request)), "generate", timeout, retries) as stream:
            return join(list(stream))

    def close(self) -> None:
        """Close the client, after its answers have ended or were cancelled; it can't be used any more."""
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
    """One try over HTTP."""

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
            return  # another thread is in it: it finds the connection broken off, and closes it

    def _exchange(self) -> Generator[Reply]:
        limit = threading.Timer(self._timeout or 0, self._expire)
        limit.daemon = True  # a program that leaves an answer behind need not wait for it
        if self._timeout is not None:
            limit.start()
        try:
            with self._client.stream(
                "POST",
                self._path,
                content=self._body,
                headers={"Content-Type": "application/json", "Accept-Encoding": "identity"},
                # a limit per read would not bound the answer; the timer does
                timeout=httpx.Timeout(None, connect=self._timeout),
                extensions={"trace": self._trace},
            ) as response:
                yield from self._read(response)
        finally:
            limit.cancel()

    def _read(self, response: httpx.Response) -> Iterator[Reply]:
        # an error that comes before the answer is an event too, under status 400, where it was the model's own
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
        """Let the server close the stream, but do not wait for ever: the answer is complete."""
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
        # where the connection is encrypted, the second socket takes the place of the first
        if event in ("connection.connect_tcp.complete", "connection.start_tls.complete"):
            self._socket = info["return_value"].get_extra_info("socket")
            if self._broken_off:
                self._break_off()

    def _break_off(self) -> None:
        """Make a read in another thread return; that thread alone may close the socket."""
        self._broken_off = True
        if self._socket is not None:
            with suppress(OSError):  # closed already
                # of a plain socket: an encrypted one would forget that it is, while another thread reads from it
                socket.socket.shutdown(self._socket, socket.SHUT_RDWR)

    def _expire(self) -> None:
        self._timed_out = True
        self._break_off()

    def _check_time(self) -> None:
        # where a body ends with its connection, breaking it off looks like the end
        if self._timed_out:
            raise self._too_late()

    def _too_late(self) -> AnswerTimeout:
        return AnswerTimeout(f"{self._url}: the answer was not complete within the timeout")


def _decode(body: str | bytes, status: int, url: str) -> Reply:
    """One response.

    Raises:
        RequestFailed: the server's error, typed by the code its text begins with. Nothing follows it.
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
        raise ServerError(f"HTTP {status} without an answer, is it Triton's HTTP port? {shown!r}")
    try:
        chunk = chunk_of(outputs)
    except ValueError as error:
        raise ServerError(f"the server's response can't be read, is it a kvloom model? {error}") from error
    return Reply(chunk, chunk.finish_reason is not None)


def _defaults(request: RequestArguments) -> RequestArguments:
    return {"model": "generate", **request}
