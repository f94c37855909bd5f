"""Requests and answers in Triton's gRPC protocol; shared by the sync and the async client. No input or output here."""

import struct
import uuid
from typing import Any

import grpc
from tritonclient.grpc import service_pb2

from kvloom_client.answer import Reply, chunk_of
from kvloom_client.errors import (
    AnswerTimeout,
    InvalidArgument,
    KvloomClientError,
    ServerError,
    access_denied,
    connection_error,
    request_error,
)
from kvloom_client.request import Place, Request, Value

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # the caller's address is meant as it is; a proxy from the environment would swallow 127.0.0.1
    ("grpc.enable_http_proxy", 0),
    # else it grows to two minutes, in which a server that is back is not noticed
    ("grpc.max_reconnect_backoff_ms", 2000),
)

_NEVER_SENT = ("failed to connect to all addresses", "errors resolving")
"""How gRPC begins when no connection came about. It has one status code for that and for connections that broke."""

_FORMATS = {"INT32": "i", "UINT32": "I", "FP32": "f"}


def encode_request(request: Request) -> service_pb2.ModelInferRequest:
    """One request for one answer.

    Raises:
        InvalidArgument: the id of its conversation can't be sent.
    """
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.id)
    # without it Triton drops a last response that carries no output, and with it the mark of the end
    message.parameters["triton_enable_empty_final_response"].bool_param = True
    if request.model == "llm":
        place = request.place or Place(uuid.uuid4().hex, start=True, end=True)
        try:
            if isinstance(place.conversation, int):
                message.parameters["sequence_id"].int64_param = place.conversation
            else:
                message.parameters["sequence_id"].string_param = place.conversation
        except ValueError as error:
            raise InvalidArgument(f"INVALID_ARG: conversation: id {place.conversation!a}: {error}") from error
        message.parameters["sequence_start"].bool_param = place.start
        message.parameters["sequence_end"].bool_param = place.end
    for name, value in request.fields.items():
        datatype, count, content = _encode(value)
        message.inputs.add(name=name, datatype=datatype, shape=[1, count])
        message.raw_input_contents.append(content)
    return message


def decode_response(message: service_pb2.ModelStreamInferResponse) -> Reply:
    """One message of the stream.

    Raises:
        RequestFailed: the server's error, typed by the code its text begins with. Nothing follows it.
    """
    if message.error_message:
        raise request_error(message.error_message)
    response = message.infer_response
    final = response.parameters["triton_final_response"].bool_param
    if not response.outputs:
        return Reply(None, final)
    try:
        outputs = {
            output.name: _decode(output.datatype, content)
            for output, content in zip(response.outputs, response.raw_output_contents, strict=True)
        }
        chunk = chunk_of(outputs)
    except (ValueError, KeyError, struct.error) as error:
        raise ServerError(f"the server's response can't be read, is it a kvloom model? {error}") from error
    if chunk.finish_reason == "error":
        # The server's form of an error if the caller's headers contain triton_grpc_error
        raise request_error(chunk.text)
    return Reply(chunk, final)


def call_error(error: grpc.RpcError, url: str) -> KvloomClientError:
    """The error that a failed gRPC call to ``url`` stands for."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AnswerTimeout(f"{url}: the answer was not complete within the timeout")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return access_denied(url, details or code.name)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        # another service, or a compression that it does not know
        return ServerError(f"{url} can't do what was asked, is it Triton's gRPC port? {details}")
    if "handshake failed" in details:
        return connection_error(url, "gRPC", details.partition("handshake failed")[2].strip(": "), sent=False, tls=True)
    # of gRPC's chain of causes the last one says what happened
    reason = details.rpartition(": ")[2] or code.name
    return connection_error(url, "gRPC", reason, sent=not details.startswith(_NEVER_SENT))


def _encode(value: Value) -> tuple[str, int, bytes]:
    """Data type, number of elements and content of a tensor."""
    if isinstance(value, str):
        content = value.encode("utf-8")
        # an element of BYTES carries its length in front
        return "BYTES", 1, struct.pack("<I", len(content)) + content
    if isinstance(value, bool):
        return "BOOL", 1, struct.pack("<?", value)
    numbers = value if isinstance(value, list) else [value]
    return "INT32", len(numbers), struct.pack(f"<{len(numbers)}i", *numbers)


def _decode(datatype: str, content: bytes) -> list[Any]:
    """The elements of a tensor. Of BYTES there is exactly one."""
    if datatype == "BYTES":
        return [content[4:].decode("utf-8")]
    return list(struct.unpack(f"<{len(content) // 4}{_FORMATS[datatype]}", content))
