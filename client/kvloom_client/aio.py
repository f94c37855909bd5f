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
    """An answer on its way: iterate it for its chunks. As a context manager it is cancelled on leaving.

    Iterating raises RequestFailed (the server's error) or TransportError (it did not arrive whole). After ``cancel``
    the iteration just ends, without a finish reason.

    Attributes:
        request_id: the request's id, as the server sees it.
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
        """Start the first try; the arguments are those of ``Stream``."""
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
        """Tell the server to stop working on the answer; also allowed after the end."""
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
        """Wait and begin another try where that is safe and there is time; False: the error ends the answer."""
        pause = self._backoff.pause_after(error)
        if pause is None and await self._mended(error):
            pause = 0.0
        else:
            # before the pause: who cancels in it ends the tries there
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
        """As ``Stream._mended``."""
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
        """Let the call close by itself: Triton would see a cancel of a request it is just finishing."""
        try:
            async for _ in self._messages:
                pass
        except grpc.RpcError:
            return  # the answer is complete; how the call closes no longer matters
        except asyncio.CancelledError:
            if not self._only_cancelled_here():
                raise

    def _only_cancelled_here(self) -> bool:
        """Whether a CancelledError is grpc's word for our own cancel of the call; the waiting task's must go on."""
        task = asyncio.current_task()
        return self._cancelled.is_set() and not (task is not None and task.cancelling())


class AsyncClient:
    """Talks to the kvloom models of one tritonserver over gRPC, from one event loop.

    Every request is a call of its own on the shared connection.
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
        self._channel = connection.open(grpc.aio, wire.CHANNEL_OPTIONS, compression)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> AsyncStream:
        """Ask for an answer and get its chunks as they come.

        Args:
            timeout: seconds for the whole answer, retries included; None waits for ever.
            retries: how often to ask again where that is safe, as for ``Client.stream``.
            request: the prompt and how to sample, see RequestArguments.

        Raises:
            InvalidArgument: at once, when the request can't be sent; everything else is raised while iterating.
        """
        return self._send(build_request(stream=True, **request), timeout, retries)

    async def generate(
        self, *, timeout: float | None = None, retries: int = 0, **request: Unpack[RequestArguments]
    ) -> Answer:
        """Ask for an answer and wait for all of it; the arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive, or not whole.
        """
        async with self._send(build_request(stream=False, **request), timeout, retries) as stream:
            return join([chunk async for chunk in stream])

    def conversation(self, conversation: int | str | None = None) -> AsyncConversation:
        """A conversation with the server, whose turns say only what is new; as ``Client.conversation``."""
        return AsyncConversation(self, conversation)

    async def control(
        self, op: str, conversation: int | str | None = None, *, timeout: float | None = None, **fields: Any
    ) -> dict[str, Any]:
        """Ask the engine for something else than an answer; as ``Client.control``."""
        async with self._send(build_control(op, conversation, **fields), timeout, 0) as stream:
            return read_control([chunk async for chunk in stream])

    async def close(self) -> None:
        """Close the connection; answers on their way are cancelled."""
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
