"""Encodes requests and decodes answers in Triton's gRPC protocol, for both gRPC clients. Does no input or output."""

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
    # No proxy from the environment, which would also be used for 127.0.0.1
    ("grpc.enable_http_proxy", 0),
    # The default grows to two minutes, for which a restarted server would go unnoticed
    ("grpc.max_reconnect_backoff_ms", 2000),
)

_NEVER_SENT = ("failed to connect to all addresses", "errors resolving")
"""The beginnings of gRPC's messages if there was no connection. Its status code is the same for broken connections."""

_FORMATS = {"INT32": "i", "UINT32": "I", "FP32": "f"}


def encode_request(request: Request) -> service_pb2.ModelInferRequest:
    """Encode a request.

    Raises:
        InvalidArgument: the id of its conversation can't be sent.
    """
    message = service_pb2.ModelInferRequest(model_name=request.model, id=request.id)
    # Otherwise Triton drops a last response without outputs, which marks the end
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
    """Decode a message of the stream.

    Raises:
        RequestFailed: the message is an error of the server, which is the last message.
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
        raise ServerError(f"can't read the server's response; check that the model is kvloom's: {error}") from error
    if chunk.finish_reason == "error":
        # The server's form of an error if the caller's headers contain triton_grpc_error
        raise request_error(chunk.text)
    return Reply(chunk, final)


def call_error(error: grpc.RpcError, url: str) -> KvloomClientError:
    """The typed error for a failed gRPC call to ``url``."""
    code, details = error.code(), error.details() or ""
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AnswerTimeout(f"{url}: the answer was not complete within the timeout")
    if code in (grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED):
        return access_denied(url, details or code.name)
    if code is grpc.StatusCode.UNIMPLEMENTED:
        # It is another service, or does not know the compression
        return ServerError(f"{url} does not support this call; check that it is Triton's gRPC port: {details}")
    if "handshake failed" in details:
        return connection_error(url, "gRPC", details.partition("handshake failed")[2].strip(": "), sent=False, tls=True)
    # The last of gRPC's chain of causes is the actual one
    reason = details.rpartition(": ")[2] or code.name
    return connection_error(url, "gRPC", reason, sent=not details.startswith(_NEVER_SENT))


def _encode(value: Value) -> tuple[str, int, bytes]:
    """The data type, number of elements and content of a tensor."""
    if isinstance(value, str):
        content = value.encode("utf-8")
        # An element of BYTES begins with its length
        return "BYTES", 1, struct.pack("<I", len(content)) + content
    if isinstance(value, bool):
        return "BOOL", 1, struct.pack("<?", value)
    numbers = value if isinstance(value, list) else [value]
    return "INT32", len(numbers), struct.pack(f"<{len(numbers)}i", *numbers)


def _decode(datatype: str, content: bytes) -> list[Any]:
    """The elements of a tensor. A BYTES tensor has exactly one."""
    if datatype == "BYTES":
        return [content[4:].decode("utf-8")]
    return list(struct.unpack(f"<{len(content) // 4}{_FORMATS[datatype]}", content))
