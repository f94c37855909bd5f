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
    """Talks to the kvloom models of one tritonserver over gRPC.

    One client may be used by many threads at once; every request is a call of its own on the shared connection.
    """

    def __init__(
        self,
        url: str,
        *,
        tls: Tls | bool = False,
        headers: Mapping[str, str] | None = None,
        compression: Compression | None = None,
    ):
        """Connects with the first request.

        Args:
            url: ``host:port`` of Triton's gRPC endpoint or of a proxy before it; ``grpcs://host:port`` is encrypted.
            tls: how to encrypt; True: with the certificates that gRPC trusts.
            headers: sent with every call as its metadata, such as ``{"authorization": "Bearer ..."}``.
            compression: of the requests.

        Raises:
            InvalidArgument: one of these can't be used.
        """
        connection = Connection.parse(url, tls, headers or {})
        self.url = url
        self._headers = connection.headers
        self._channel = connection.open(grpc, wire.CHANNEL_OPTIONS, compression)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]) -> Stream:
        """Ask for an answer and get its chunks as they come.

        Args:
            timeout: seconds for the whole answer, retries included; None waits for ever.
            retries: how often to ask again where that is safe: nothing of the answer has arrived, and there was no
                connection or the server refused the request as UNAVAILABLE. Pauses grow from 0.1 s to 5 s.
            request: the prompt and how to sample, see RequestArguments.

        Raises:
            InvalidArgument: at once, when the request can't be sent; everything else is raised while iterating.
        """
        return self._send(build_request(stream=True, **request), timeout, retries)

    def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Ask for an answer and wait for all of it; the arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive, or not whole.
        """
        with self._send(build_request(stream=False, **request), timeout, retries) as stream:
            return join(list(stream))

    def conversation(self, conversation: int | str | None = None) -> Conversation:
        """A conversation with the server, whose turns say only what is new.

        Args:
            conversation: its sequence id, a positive integer or a text of up to 128 characters; the integer 7 and the
                text "7" differ. None mints one.
        """
        return Conversation(self, conversation)

    def control(
        self, op: str, conversation: int | str | None = None, *, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask the engine for something else than an answer.

        Args:
            op: ``ping``, ``status``, ``cancel``, ``end``, ``flush`` or ``drain``.
            conversation: its sequence id, for the ops that are about one; the integer 7 and the text "7" differ.
            timeout: seconds; None waits for ever.
            fields: further keys of the op, such as ``admin_token``.

        Returns:
            What the server says: ``op``, ``ok`` and what the op is about.

        Raises:
            InvalidArgument: at once, when ``status``, ``cancel`` or ``end`` comes without a conversation.
            RequestFailed: the server refused it.
            TransportError: its reply did not arrive.
        """
        with self._send(build_control(op, conversation, **fields), timeout, 0) as stream:
            return read_control(list(stream))

    def close(self) -> None:
        """Close the connection; answers on their way are cancelled."""
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
    """One try over gRPC."""

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
        """Let the call close by itself: Triton would see a cancel of a request it is just finishing."""
        try:
            for _ in self._messages:
                pass
        except grpc.RpcError:
            return  # the answer is complete; how the call closes no longer matters
