"""The client for asyncio programs."""

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from kvloom_client import wire
from kvloom_client.errors import IncompleteAnswer, RequestFailed
from kvloom_client.wire import Answer, Chunk, RequestArguments


class AsyncStream(AsyncIterator[Chunk]):
    """An answer on its way: iterate it for its chunks. As a context manager it is cancelled on leaving.

    Iterating raises RequestFailed (the server's error) or TransportError (it did not arrive whole). After ``cancel``
    the iteration just ends, without a finish reason.

    Attributes:
        request_id: the request's id, as the server sees it.
    """

    def __init__(self, call: Any, url: str, request_id: str):
        self.request_id = request_id
        self._call = call
        self._messages = call.__aiter__()
        self._url = url
        self._ended = False
        self._cancelled = False

    def __aiter__(self) -> "AsyncStream":
        return self

    async def __anext__(self) -> Chunk:
        while not self._ended:
            try:
                reply = wire.decode_response(await anext(self._messages))
            except StopAsyncIteration:
                self._ended = True
                raise IncompleteAnswer(f"{self._url}: the stream ended without a last response") from None
            except RequestFailed:
                await self._finish()
                raise
            except grpc.RpcError as error:
                self._ended = True
                raise wire.transport_error(error, self._url) from error
            except asyncio.CancelledError:
                # grpc raises it for our own cancel of the call too; a cancel of the waiting task must go on
                self._ended = True
                task = asyncio.current_task()
                if not self._cancelled or (task is not None and task.cancelling()):
                    raise
                break
            if reply.final:
                await self._finish()
            if reply.chunk is not None:
                return reply.chunk
        raise StopAsyncIteration

    def cancel(self) -> None:
        """Tell the server to stop working on the answer; also allowed after the end."""
        if not self._ended:
            self._cancelled = True
            self._call.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called before the answer had ended."""
        return self._cancelled

    async def __aenter__(self) -> "AsyncStream":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    async def _finish(self) -> None:
        """Let the call close by itself: Triton would see a cancel of a request it is just finishing."""
        self._ended = True
        try:
            async for _ in self._messages:
                pass
        except grpc.RpcError:
            return  # the answer is complete; how the call closes no longer matters


class AsyncClient:
    """Talks to the kvloom models of one tritonserver over gRPC, from one event loop.

    Every request is a call of its own on the shared connection.
    """

    def __init__(self, url: str):
        """Args: url: ``host:port`` of Triton's gRPC endpoint. Connects with the first request."""
        self.url = url
        self._channel = grpc.aio.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, *, timeout: float | None = None, **request: Unpack[RequestArguments]) -> AsyncStream:
        """Ask for an answer and get its chunks as they come.

        Args:
            timeout: seconds for the whole answer; None waits for ever.
            request: the prompt and how to sample, see RequestArguments.

        Raises:
            InvalidArgument: at once, when the prompt can't be sent; everything else is raised while iterating.
        """
        return self._send(wire.encode_request(stream=True, **request), timeout)

    async def generate(self, *, timeout: float | None = None, **request: Unpack[RequestArguments]) -> Answer:
        """Ask for an answer and wait for all of it; the arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive, or not whole.
        """
        async with self._send(wire.encode_request(stream=False, **request), timeout) as stream:
            return wire.join([chunk async for chunk in stream])

    async def close(self) -> None:
        """Close the connection; answers on their way are cancelled."""
        await self._channel.close()

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    def _send(self, request: Any, timeout: float | None) -> AsyncStream:
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout)
        return AsyncStream(call, self.url, request.id)
