"""A gRPC server whose answers the test sets, and which records the requests."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from support.triton_response import response

BUSY = "UNAVAILABLE: queue full"
NEVER = None
"""An answer that does not come while its client waits."""


class Scripted(service_pb2_grpc.GRPCInferenceServiceServicer):
    """Answers each request with the next answer: an error text, a list of texts, a gRPC status, or ``NEVER``.

    Records the requests and their metadata. Listens on ``port``; 0 takes a free one.
    """

    def __init__(self, *answers: str | list[str] | grpc.StatusCode | None, port: int = 0):
        self.answers = list(answers)
        self.port = port
        self.requests: list[service_pb2.ModelInferRequest] = []
        self.metadata: list[dict[str, str]] = []

    def ModelStreamInfer(self, requests, context) -> Iterator[service_pb2.ModelStreamInferResponse]:
        self.requests.append(next(requests))
        self.metadata.append(dict(context.invocation_metadata()))
        answer = self.answers.pop(0)
        if isinstance(answer, grpc.StatusCode):
            context.abort(answer, "as the test says")
        if answer is NEVER:
            over = threading.Event()
            if context.add_callback(over.set):
                over.wait(30)
            return
        if isinstance(answer, str):
            yield service_pb2.ModelStreamInferResponse(error_message=answer)
            return
        for number, text in enumerate(answer, 1):
            yield response(text, "stop" if number == len(answer) else "")

    def __enter__(self) -> "Scripted":
        self._server = grpc.server(ThreadPoolExecutor(2))
        service_pb2_grpc.add_GRPCInferenceServiceServicer_to_server(self, self._server)
        self.url = f"127.0.0.1:{self._server.add_insecure_port(f'127.0.0.1:{self.port}')}"
        self._server.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._server.stop(0).wait()


def inputs(request: service_pb2.ModelInferRequest) -> dict[str, tuple[str, list[int], bytes]]:
    return {
        tensor.name: (tensor.datatype, list(tensor.shape), content)
        for tensor, content in zip(request.inputs, request.raw_input_contents, strict=True)
    }


def place(request) -> tuple[int, bool, bool]:
    return (
        request.parameters["sequence_id"].int64_param,
        request.parameters["sequence_start"].bool_param,
        request.parameters["sequence_end"].bool_param,
    )
