"""Builds requests from a client's arguments, for all protocols."""

import json
import operator
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypedDict

from kvloom_client.errors import InvalidArgument

Message = Mapping[str, Any]
Value = str | bool | int | list[int]

_ASKED_FOR = ("return_finish_reason", "return_num_input_tokens", "return_token_ids")
_ON_REQUEST = ("return_logprobs", "return_cumulative_logprob", "return_usage")
_ABOUT_A_CONVERSATION = ("status", "cancel", "end")
_NUMBERS = ("stream_interval_ms", "priority", "deadline_ms")


class RequestArguments(TypedDict, total=False):
    """The arguments of a request: exactly one prompt, the requested outputs, options and sampling keys.

    Attributes:
        text_input: the prompt as text.
        messages: the prompt as chat messages, each with ``role`` and ``content``.
        input_ids: the prompt as token ids.
        model: ``llm`` or ``generate``. The default is ``llm`` over gRPC and ``generate`` over HTTP.
        request_id: an id for the server's log. Generated if absent.
        return_logprobs: chunks have ``logprobs``. ``logprobs=N`` adds the N most likely tokens to each entry.
        return_cumulative_logprob: chunks have ``cumulative_logprob``.
        return_usage: the last chunk has ``usage``.
        stream_interval_ms: minimum milliseconds between the chunks of a stream; 0 for every token.
        deadline_ms: milliseconds after which the server ends the answer with finish_reason ``deadline``.
        priority: higher runs first; 0 by default.
        cache_salt: only requests with the same salt share cached prefixes.
        kv: options for the KV cache: ``dtype``, ``policy``, ...
        sampling_parameters: sampling keys by name. The keyword arguments below take precedence.
        max_tokens: this and all following arguments are the server's sampling keys. The server documents and checks
            them.
    """

    text_input: str | None
    messages: Sequence[Message] | None
    input_ids: Sequence[int] | None
    model: str
    request_id: str | None
    return_logprobs: bool
    return_cumulative_logprob: bool
    return_usage: bool
    stream_interval_ms: int | None
    deadline_ms: int | None
    priority: int | None
    cache_salt: str | None
    kv: Mapping[str, Any] | None
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
    length_penalty: float
    seed: int | None
    stop: str | Sequence[str]
    stop_token_ids: Sequence[int]
    bad_words: str | Sequence[str]
    include_stop_str_in_output: bool
    ignore_eos: bool
    logprobs: int | None
    logit_bias: Mapping[str, float]
    skip_special_tokens: bool
    n: int
    beam_width: int


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a request in a conversation.

    Attributes:
        conversation: the id of its Triton sequence. The integer 7 and the string "7" are different ids.
        start: whether it starts the conversation.
        end: whether it ends the conversation.
    """

    conversation: int | str
    start: bool = False
    end: bool = False


@dataclass(frozen=True, slots=True)
class Request:
    """A request.

    Attributes:
        model: the Triton model.
        id: the request's id.
        fields: inputs of the model by name. A str is one BYTES element, a bool a BOOL, ints are INT32.
        place: its place in a conversation; None for a request outside of conversations.
    """

    model: str
    id: str
    fields: dict[str, Value]
    place: Place | None = None


def build_request(
    *,
    stream: bool,
    text_input: str | None = None,
    messages: Sequence[Message] | None = None,
    input_ids: Sequence[int] | None = None,
    model: str = "llm",
    request_id: str | None = None,
    sampling_parameters: Mapping[str, Any] | None = None,
    kv: Mapping[str, Any] | None = None,
    cache_salt: str | None = None,
    place: Place | None = None,
    **others: Any,
) -> Request:
    """Build a request for an answer. For the other arguments see RequestArguments.

    Args:
        stream: whether responses come as tokens do, or one response with the whole answer.
        place: see Request.

    Raises:
        InvalidArgument: there is not exactly one prompt, or a value can't be sent.
    """
    if sum(prompt is not None for prompt in (text_input, messages, input_ids)) != 1:
        raise InvalidArgument("INVALID_ARG: give exactly one of text_input, messages and input_ids")
    fields: dict[str, Value] = {}
    if text_input is not None:
        fields["text_input"] = _text("text_input", text_input)
    if messages is not None:
        fields["messages"] = _json("messages", list(messages))
    if input_ids is not None:
        fields["input_ids"] = _numbers("input_ids", input_ids)
    for name in _NUMBERS:
        number = others.pop(name, None)
        if number is not None:
            [fields[name]] = _numbers(name, [number])
    if kv is not None:
        fields["kv"] = _json("kv", dict(kv))
    if cache_salt is not None:
        fields["cache_salt"] = _text("cache_salt", cache_salt)
    fields["stream"] = stream
    fields["exclude_input_in_output"] = True
    fields |= dict.fromkeys(_ASKED_FOR, True)
    # Only if requested, because an older server refuses inputs that it does not know
    fields |= {name: True for name in _ON_REQUEST if others.pop(name, False)}
    # The server checks the other arguments
    sampling = {**(sampling_parameters or {}), **others}
    if sampling:
        fields["sampling_parameters"] = _json("sampling_parameters", sampling)
    return Request(model, _id(request_id), fields, place)


def build_control(
    op: str, conversation: int | str | None = None, *, place: Place | None = None, **more: Any
) -> Request:
    """Build a control request.

    Raises:
        InvalidArgument: a value can't be sent, or the op needs a conversation and has neither an id nor a place.
    """
    if op in _ABOUT_A_CONVERSATION and conversation is None and place is None:
        raise InvalidArgument(f"INVALID_ARG: conversation: {op} needs the id of a conversation")
    named = {} if conversation is None else {"conversation": conversation}
    return Request("llm", _id(None), {"control": _json("control", {"op": op, **named, **more})}, place)


def _id(given: str | None) -> str:
    return _text("request_id", given) if given else uuid.uuid4().hex


def _json(name: str, value: Any) -> str:
    try:
        # Unescaped, so that lone surrogates are found here and not by the server
        return _text(name, json.dumps(value, ensure_ascii=False))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"INVALID_ARG: {name}: not JSON: {error}") from error


def _text(name: str, text: str) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise InvalidArgument(f"INVALID_ARG: {name}: not valid text: {error.reason}") from error
    return text


def _numbers(name: str, values: Iterable[Any]) -> list[int]:
    try:
        numbers = [operator.index(value) for value in values]
    except TypeError as error:
        raise InvalidArgument(f"INVALID_ARG: {name}: must be integers: {error}") from error
    # Over HTTP, Triton would silently take larger numbers modulo 2^32
    wrong = [number for number in numbers if not -(2**31) <= number < 2**31]
    if wrong:
        raise InvalidArgument(f"INVALID_ARG: {name}: must be integers of 32 bits, got {wrong[0]}")
    return numbers
