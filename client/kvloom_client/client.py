"""The gRPC client for plain and threaded programs."""

from collections.abc import Callable, Iterator, Mapping
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvloom_client import wire
from kvloom_client.answer import Answer, Reply, join, read_control
from kvloom_client.connection import Compression, Connection, Headers, Tls
from kvloom_client.conversation import Conversation
from kvloom_client.errors import KvloomClientError, RequestFailed
from kvloom_client.request import Request, RequestArguments, build_control, build_request
from kvloom_client.retry import Watch
from kvloom_client.stream import Stream


class Client:
    """Sends requests to the kvloom models of one tritonserver over gRPC.

    Many threads may use one client at once. Every request is a separate call on the shared connection.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | bool = False,
        headers: Mapping[str, str] | None = None,
        compression: Compression | None = None,
    ):
        """Create a client. It connects with the first request.

        Args:
            url: ``host:port`` of Triton's gRPC endpoint or of a proxy for it; ``grpcs://host:port`` for TLS.
            tls: how to encrypt; True for TLS with the certificates that gRPC trusts.
            headers: metadata of every call, such as ``{"authorization": "Bearer ..."}``.
            compression: the compression of requests.

        Raises:
            InvalidArgument: an argument is invalid.
        """
        connection = Connection.parse(url, tls, headers or {})
        self.url = url
        self._headers = connection.headers
        self._channel = connection.open(grpc, wire.CHANNEL_OPTIONS, compression)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]) -> Stream:
        """Request an answer and receive its chunks as they come.

        Args:
            timeout: maximum seconds for the whole answer including retries; None for no limit.
            retries: maximum number of retries. A request is retried only if that is safe: no part of the answer has
                arrived, and there was no connection or the server refused the request as UNAVAILABLE. The pauses grow
                from 0.1 s to 5 s.
            request: the prompt, sampling keys and options, see RequestArguments.

        Raises:
            InvalidArgument: the request can't be sent. All other errors are raised while iterating.
        """
        return self._send(build_request(stream=True, **request), timeout, retries)

    def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Request an answer and wait for all of it. The arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive completely.
        """
        with self._send(build_request(stream=False, **request), timeout, retries) as stream:
            return join(list(stream))

    def conversation(self, conversation: int | str | None = None) -> Conversation:
        """A conversation, whose turns send only new messages.

        Args:
            conversation: its sequence id, a positive integer or a string of up to 128 characters. The integer 7 and the
                string "7" are different ids. None generates one.
        """
        return Conversation(self, conversation)

    def control(
        self, op: str, conversation: int | str | None = None, *, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a control request.

        Args:
            op: ``ping``, ``status``, ``cancel``, ``end``, ``flush`` or ``drain``.
            conversation: the sequence id, for ``status``, ``cancel`` and ``end``. The integer 7 and the string "7" are
                different ids.
            timeout: maximum seconds; None for no limit.
            fields: further keys of the op, such as ``admin_token``.

        Returns:
            The server's reply: ``op``, ``ok`` and the results of the op.

        Raises:
            InvalidArgument: ``status``, ``cancel`` or ``end`` has no conversation.
            RequestFailed: the server refused the request.
            TransportError: the reply did not arrive.
        """
        with self._send(build_control(op, conversation, **fields), timeout, 0) as stream:
            return read_control(list(stream))

    def close(self) -> None:
        """Close the connection. Running answers are cancelled."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(
        self,
        request: Request,
        timeout: float | None,
        retries: int,
        *,
        watch: Watch | None = None,
        mend: Callable[[KvloomClientError, float | None], Stream | None] | None = None,
    ) -> Stream:
        """The arguments are those of ``Stream``."""
        message = wire.encode_request(request)

        def call(left: float | None) -> _Call:
            return _Call(self._stub, message, self._headers, self.url, left)

        return Stream(call, request.id, self.url, timeout, retries, watch, mend)


class _Call(Iterator[Reply]):
    """One attempt over gRPC."""

    def __init__(
        self,
        stub: Any,
        message: service_pb2.ModelInferRequest,
        headers: Headers,
        url: str,
        timeout: float | None,
    ):
        self._messages = stub.ModelStreamInfer(iter((message,)), timeout=timeout, metadata=headers)
        self._url = url

    def __next__(self) -> Reply:
        try:
            reply = wire.decode_response(next(self._messages))
        except RequestFailed:
            self._drain()
            raise
        except grpc.RpcError as error:
            raise wire.call_error(error, self._url) from error
        if reply.final:
            self._drain()
        return reply

    def cancel(self) -> None:
        self._messages.cancel()

    def _drain(self) -> None:
        """Let the call close by itself. Otherwise Triton would see a cancel of a request that it is about to finish."""
        try:
            for _ in self._messages:
                pass
        except grpc.RpcError:
            return  # the answer is complete, so errors while closing do not matter
