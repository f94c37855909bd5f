"""The gRPC client for asyncio programs."""

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from kvloom_client import wire
from kvloom_client.answer import Answer, Chunk, join, read_control
from kvloom_client.connection import Compression, Connection, Tls
from kvloom_client.conversation import AsyncConversation
from kvloom_client.errors import IncompleteAnswer, KvloomClientError, NotFound, RequestFailed
from kvloom_client.request import Request, RequestArguments, build_control, build_request
from kvloom_client.retry import Backoff, Watch


class AsyncStream(AsyncIterator[Chunk]):
    """A running answer. Iterate it for its chunks. A context manager that cancels it.

    Iterating raises RequestFailed (an error of the server) or TransportError (the answer did not arrive completely).
    After ``cancel`` the iteration ends without a finish reason.

    Attributes:
        request_id: the request's id on the server.
    """

    def __init__(
        self,
        call: Callable[[float | None], Any],
        request_id: str,
        url: str,
        timeout: float | None,
        retries: int,
        watch: Watch | None = None,
        mend: Callable[[KvloomClientError, float | None], "AsyncStream | None"] | None = None,
    ):
        """Start the first attempt. The arguments are those of ``Stream``."""
        self.request_id = request_id
        self._url = url
        self._begin = call
        self._watch = watch or Watch()
        self._mend = mend
        self._mending: AsyncStream | None = None
        self._backoff = Backoff(retries, timeout, self._watch.may_retry)
        self._ended = False
        self._cancelled = asyncio.Event()
        self._watch.sending()
        self._call = call(timeout)
        self._messages = self._call.__aiter__()

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                reply = wire.decode_response(await anext(self._messages))
            except StopAsyncIteration:
                self._ended = True
                if self._cancelled.is_set():
                    break
                raise IncompleteAnswer(f"{self._url}: the stream ended without a last response") from None
            except RequestFailed as error:
                await self._drain()
                if await self._try_again(error):
                    continue
                raise
            except grpc.RpcError as error:
                failure = wire.call_error(error, self._url)
                if await self._try_again(failure):
                    continue
                if self._cancelled.is_set():
                    break
                raise failure from error
            except asyncio.CancelledError:
                self._ended = True
                if not self._only_cancelled_here():
                    raise
                break
            self._watch.answered()
            self._backoff.give_up()
            self._mend = None
            if reply.final:
                self._ended = True
                await self._drain()
            if reply.chunk is not None:
                return reply.chunk
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Cancel the answer on the server. Does nothing after the end."""
        if not self._ended:
            self._cancelled.set()
            self._call.cancel()
            if self._mending is not None:
                self._mending.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called before the answer had ended."""
        return self._cancelled.is_set()

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _try_again(self, error: KvloomClientError) -> bool:
        """Wait and begin another attempt if it is safe and in time. Returns False if the answer has failed."""
        pause = self._backoff.pause_after(error)
        if pause is None and await self._mended(error):
            pause = 0.0
        else:
            # Before the pause, because a cancel during the pause ends the attempts
            self._watch.failed(error)
        if pause is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await self._cancelled.wait()
        if pause is None or self._cancelled.is_set():
            self._ended = True
            return pause is not None
        self._watch.sending()
        self._call = self._begin(self._backoff.time_left)
        self._messages = self._call.__aiter__()
        return True

    async def _mended(self, error: KvloomClientError) -> bool:
        """See ``Stream._mended``."""
        mend, self._mend = self._mend, None
        self._mending = mend(error, self._backoff.time_left) if mend is not None else None
        if self._mending is None:
            return False
        try:
            [_ async for _ in self._mending]
        except NotFound:
            return False
        except KvloomClientError:
            self._ended = True
            raise
        return True

    async def _drain(self) -> None:
        """Let the call close by itself. Otherwise Triton would see a cancel of a request that it is about to finish."""
        try:
            async for _ in self._messages:
                pass
        except grpc.RpcError:
            return  # the answer is complete, so errors while closing do not matter
        except asyncio.CancelledError:
            if not self._only_cancelled_here():
                raise

    def _only_cancelled_here(self) -> bool:
        """Whether a CancelledError comes from ``cancel``. If the waiting task was cancelled, it must be raised."""
        task = asyncio.current_task()
        return self._cancelled.is_set() and not (task is not None and task.cancelling())


class AsyncClient:
    """Sends requests to the kvloom models of one tritonserver over gRPC, from one event loop.

    Every request is a separate call on the shared connection.
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
        self._channel = connection.open(grpc.aio, wire.CHANNEL_OPTIONS, compression)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> AsyncStream:
        """Request an answer and receive its chunks as they come.

        Args:
            timeout: maximum seconds for the whole answer including retries; None for no limit.
            retries: maximum number of retries, see ``Client.stream``.
            request: the prompt, sampling keys and options, see RequestArguments.

        Raises:
            InvalidArgument: the request can't be sent. All other errors are raised while iterating.
        """
        return self._send(build_request(stream=True, **request), timeout, retries)

    async def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Request an answer and wait for all of it. The arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive completely.
        """
        async with self._send(build_request(stream=False, **request), timeout, retries) as stream:
            return join([chunk async for chunk in stream])

    def conversation(self, conversation: int | str | None = None) -> AsyncConversation:
        """A conversation, whose turns send only new messages, see ``Client.conversation``."""
        return AsyncConversation(self, conversation)

    async def control(
        self, op: str, conversation: int | str | None = None, *, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Send a control request, see ``Client.control``."""
        async with self._send(build_control(op, conversation, **fields), timeout, 0) as stream:
            return read_control([chunk async for chunk in stream])

    async def close(self) -> None:
        """Close the connection. Running answers are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _send(
        self,
        request: Request,
        timeout: float | None,
        retries: int,
        *,
        watch: Watch | None = None,
        mend: Callable[[KvloomClientError, float | None], AsyncStream | None] | None = None,
    ) -> AsyncStream:
        """The arguments are those of ``Stream``."""
        message = wire.encode_request(request)

        def call(left: float | None) -> Any:
            return self._stub.ModelStreamInfer(iter((message,)), timeout=left, metadata=self._headers)

        return AsyncStream(call, request.id, self.url, timeout, retries, watch, mend)
