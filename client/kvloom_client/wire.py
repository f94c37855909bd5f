"""Requests and answers in Triton's gRPC protocol; shared by the sync and the async client. No input or output here."""

import json
import struct
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

import grpc
from tritonclient.grpc import service_pb2

from kvloom_client.errors import (
    AnswerTimeout,
    ConnectionFailed,
    IncompleteAnswer,
    InvalidArgument,
    TransportError,
    request_error,
)

Message = Mapping[str, Any]

CHANNEL_OPTIONS = (
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    # the caller's address is meant as it is; a proxy from the environment would swallow 127.0.0.1
    ("grpc.enable_http_proxy", 0),
)

_ASKED_FOR = ("return_finish_reason", "return_num_input_tokens", "return_num_output_tokens", "return_token_ids")


@dataclass(frozen=True, slots=True)
class Chunk:
    """What one response adds to an answer.

    Attributes:
        text: the text that became certain with it; may be empty.
        token_ids: tokens generated since the previous chunk.
        finish_reason: why the answer ended (``stop``, ``length``, ...); None before the last chunk.
        num_input_tokens: tokens of the prompt.
        num_output_tokens: tokens counted by this chunk.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole answer.

    Attributes:
        text: the answer without the prompt.
        token_ids: every token generated, end and stop tokens included.
        finish_reason: why it ended: ``stop``, ``length``, ``cancelled`` or ``deadline``.
        num_input_tokens: tokens of the prompt.
        num_output_tokens: tokens generated.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_input_tokens: int
    num_output_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    """One message of a stream: a chunk, unless it is only the mark of the end; ``final`` when nothing follows."""

    chunk: Chunk | None
    final: bool


class RequestArguments(TypedDict, total=False):
    """What a request may say: exactly one prompt, and how to sample.

    Attributes:
        text_input: the prompt as text.
        messages: the prompt as chat messages, each with ``role`` and ``content``.
        input_ids: the prompt as token ids.
        model: ``llm`` (the default) or ``generate``.
        request_id: shown in the server's log; minted when absent.
        sampling_parameters: sampling keys by name; the keyword arguments below win over it.
        max_tokens: and everything after it: the server's sampling keys; it documents and checks them.
    """

    text_input: str | None
    messages: Sequence[Message] | None
    input_ids: Sequence[int] | None
    model: str
    request_id: str | None
    sampling_parameters: Mapping[str, Any] | None
    max_tokens: int
    min_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    presence_penalty: float
    frequency_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logit_bias: Mapping[str, float]
    skip_special_tokens: bool


def encode_request(
    *,
    stream: bool,
    text_input: str | None = None,
    messages: Sequence[Message] | None = None,
    input_ids: Sequence[int] | None = None,
    model: str = "llm",
    request_id: str | None = None,
    sampling_parameters: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> service_pb2.ModelInferRequest:
    """One request for one answer; see RequestArguments. ``stream``: responses come as tokens do, or once at the end.

    Raises:
        InvalidArgument: there is not exactly one prompt, or it can't be encoded.
    """
    if sum(prompt is not None for prompt in (text_input, messages, input_ids)) != 1:
        raise InvalidArgument("INVALID_ARG: give exactly one of text_input, messages and input_ids")
    request = service_pb2.ModelInferRequest(model_name=model, id=request_id or uuid.uuid4().hex)
    # without it Triton drops a last response that carries no output, and with it the mark of the end
    request.parameters["triton_enable_empty_final_response"].bool_param = True
    if model == "llm":
        # a conversation of one turn
        request.parameters["sequence_id"].string_param = uuid.uuid4().hex
        request.parameters["sequence_start"].bool_param = True
        request.parameters["sequence_end"].bool_param = True

    def add(name: str, datatype: str, count: int, content: bytes) -> None:
        request.inputs.add(name=name, datatype=datatype, shape=[1, count])
        request.raw_input_contents.append(content)

    if text_input is not None:
        add("text_input", "BYTES", 1, _encode_string("text_input", text_input))
    if messages is not None:
        add("messages", "BYTES", 1, _encode_string("messages", json.dumps(list(messages))))
    if input_ids is not None:
        add("input_ids", "INT32", len(input_ids), _encode_ids(input_ids))
    keys = {**(sampling_parameters or {}), **sampling}
    if keys:
        add("sampling_parameters", "BYTES", 1, _encode_string("sampling_parameters", json.dumps(keys)))
    add("stream", "BOOL", 1, _encode_bool(stream))
    add("exclude_input_in_output", "BOOL", 1, _encode_bool(True))
    for name in _ASKED_FOR:
        add(name, "BOOL", 1, _encode_bool(True))
    return request


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
    raw = {output.name: content for output, content in zip(response.outputs, response.raw_output_contents, strict=True)}
    chunk = Chunk(
        text=_decode_string(raw.get("text_output", b"")),
        token_ids=tuple(_decode_numbers("i", raw.get("token_ids", b""))),
        finish_reason=_decode_string(raw.get("finish_reason", b"")) or None,
        num_input_tokens=sum(_decode_numbers("I", raw.get("num_input_tokens", b""))),
        num_output_tokens=sum(_decode_numbers("I", raw.get("num_output_tokens", b""))),
    )
    return Reply(chunk, final)


def transport_error(error: grpc.RpcError, url: str) -> TransportError:
    """The error that a failed gRPC call to ``url`` stands for."""
    code, details = error.code(), error.details()
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return AnswerTimeout(f"{url}: the answer was not complete within the timeout")
    return ConnectionFailed(f"{url}: {code.name}: {details}")


def join(chunks: Sequence[Chunk]) -> Answer:
    """The whole answer; ``chunks`` are all of a finished stream's.

    Raises:
        IncompleteAnswer: the server ended the stream without saying why.
    """
    if not chunks or chunks[-1].finish_reason is None:
        raise IncompleteAnswer("the last response carries no finish reason")
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=chunks[-1].finish_reason,
        num_input_tokens=chunks[-1].num_input_tokens,
        num_output_tokens=sum(chunk.num_output_tokens for chunk in chunks),
    )


def _encode_string(name: str, text: str) -> bytes:
    try:
        content = text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"INVALID_ARG: {name}: not valid text: {error.reason}") from error
    return struct.pack("<I", len(content)) + content


def _encode_ids(input_ids: Sequence[int]) -> bytes:
    try:
        return struct.pack(f"<{len(input_ids)}i", *input_ids)
    except struct.error as error:
        raise InvalidArgument(f"INVALID_ARG: input_ids: must be integers of 32 bits: {error}") from error


def _encode_bool(value: bool) -> bytes:
    return struct.pack("<?", value)


def _decode_string(content: bytes) -> str:
    # an element of BYTES carries its length in front; there is exactly one
    return content[4:].decode("utf-8")


def _decode_numbers(kind: str, content: bytes) -> tuple[int, ...]:
    return struct.unpack(f"<{len(content) // 4}{kind}", content)
