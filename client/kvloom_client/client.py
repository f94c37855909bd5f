"""The client for plain and threaded programs."""

import threading
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Unpack

import grpc
from tritonclient.grpc import service_pb2_grpc

from kvloom_client import wire
from kvloom_client.errors import IncompleteAnswer, RequestFailed
from kvloom_client.wire import Answer, Chunk, RequestArguments


class Stream(Iterator[Chunk]):
    """An answer on its way: iterate it for its chunks. As a context manager it is cancelled on leaving.

    Iterating raises RequestFailed (the server's error) or TransportError (it did not arrive whole). After ``cancel``
    the iteration just ends, without a finish reason.

    Attributes:
        request_id: the request's id, as the server sees it.
    """

    def __init__(self, call: Any, url: str, request_id: str):
        self.request_id = request_id
        self._call = call
        self._url = url
        self._ended = False
        self._cancelled = threading.Event()

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Chunk:
        while not self._ended:
            try:
                reply = wire.decode_response(next(self._call))
            except StopIteration:
                self._ended = True
                raise IncompleteAnswer(f"{self._url}: the stream ended without a last response") from None
            except RequestFailed:
                self._finish()
                raise
            except grpc.RpcError as error:
                self._ended = True
                if self._cancelled.is_set():
                    break
                raise wire.transport_error(error, self._url) from error
            if reply.final:
                self._finish()
            if reply.chunk is not None:
                return reply.chunk
        raise StopIteration

    def cancel(self) -> None:
        """Tell the server to stop working on the answer; any thread may call it, also after the end."""
        if not self._ended:
            self._cancelled.set()
            self._call.cancel()

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called before the answer had ended."""
        return self._cancelled.is_set()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _finish(self) -> None:
        """Let the call close by itself: Triton would see a cancel of a request it is just finishing."""
        self._ended = True
        try:
            for _ in self._call:
                pass
        except grpc.RpcError:
            return  # the answer is complete; how the call closes no longer matters


class Client:
    """Talks to the kvloom models of one tritonserver over gRPC.

    One client may be used by many threads at once; every request is a call of its own on the shared connection.
    """

    def __init__(self, url: str):
        """Args: url: ``host:port`` of Triton's gRPC endpoint. Connects with the first request."""
        self.url = url
        self._channel = grpc.insecure_channel(url, options=wire.CHANNEL_OPTIONS)
        self._stub = service_pb2_grpc.GRPCInferenceServiceStub(self._channel)

    def stream(self, *, timeout: float | None = None, **request: Unpack[RequestArguments]) -> Stream:
        """Ask for an answer and get its chunks as they come.

        Args:
            timeout: seconds for the whole answer; None waits for ever.
            request: the prompt and how to sample, see RequestArguments.

        Raises:
            InvalidArgument: at once, when the prompt can't be sent; everything else is raised while iterating.
        """
        return self._send(wire.encode_request(stream=True, **request), timeout)

    def generate(self, *, timeout: float | None = None, **request: Unpack[RequestArguments]) -> Answer:
        """Ask for an answer and wait for all of it; the arguments are those of ``stream``.

        Raises:
            RequestFailed: the server answered with an error.
            TransportError: the answer did not arrive, or not whole.
        """
        with self._send(wire.encode_request(stream=False, **request), timeout) as stream:
            return wire.join(list(stream))

    def close(self) -> None:
        """Close the connection; answers on their way are cancelled."""
        self._channel.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _send(self, request: Any, timeout: float | None) -> Stream:
        call = self._stub.ModelStreamInfer(iter((request,)), timeout=timeout)
        return Stream(call, self.url, request.id)
