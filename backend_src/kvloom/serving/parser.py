"""Parses a request's tensors, or raises an error that says what is wrong with them. Used by `llm`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from kvloom.errors import InvalidArgument
from kvloom.request import Request, SamplingParams
from kvloom.scheduling.admission import EngineLimits
from kvloom.serving.control import Control, read_control
from kvloom.serving.inputs import (
    Inputs,
    json_object,
    many,
    one,
    outputs_asked_for,
    prompt_kind,
    read,
    validate,
)
from kvloom.serving.interface import INPUTS, Part, inputs_of
from kvloom.serving.options import read_kv, read_options
from kvloom.text.chat import Message, parse_messages
from kvloom.text.tokenizer import Tokenizer

MAX_JSON = 2**20
"""Maximum length of the sampling JSON in characters. Parsing it delays all other requests."""

_NAMES = [declared.name for declared in INPUTS]
_SAMPLING = inputs_of(Part.SAMPLING)
_NOT_SAMPLING = {"id"}
"""Request parameters that Triton's HTTP endpoint adds."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """The new prompt of a request, which continues its conversation.

    Attributes:
        ids: its token ids. Empty for messages in a later turn: their tokens depend on how the previous turn ends.
        messages: the new messages, if the prompt consists of messages.
        rendered: the messages as the chat template renders them, if they start a conversation.
        text: the raw text, if it is sent in a later turn. Its tokens depend on how the previous turn ends; ``ids`` are
            right if that turn ends with ordinary text.
    """

    ids: tuple[int, ...]
    messages: list[Message] | None = None
    rendered: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A parsed request for an answer.

    Attributes:
        request: the engine's request.
        prompt: the new prompt.
        kv: its options for the KV cache. None if a later turn keeps those of the conversation's first turn.
        interval_s: minimum time between responses in seconds. Infinite for an answer that is not streamed.
        echo: text that the answer begins with.
        outputs: the names of the optional outputs that it asks for.
    """

    request: Request
    prompt: Prompt
    kv: dict[str, object] | None
    interval_s: float
    echo: str
    outputs: frozenset[str]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A parsed control request.

    Attributes:
        control: the `control` input.
        outputs: the names of the optional outputs that it asks for.
    """

    control: Control
    outputs: frozenset[str]


def receive(request: Any) -> tuple[Inputs, ControlCall | None]:
    """Copy the tensors of a ``pb_utils.InferenceRequest`` and parse a control request. All requests pass here first.

    Returns:
        The tensors, copied because the request's own lie in Triton's shared memory, and the parsed control request.
        None in its place means that the request asks for an answer: ``parse`` reads it.

    Raises:
        InvalidArgument: an input is wrong. The message names the input or key.
    """
    inputs = {name: np.array(value) for name, value in read(request).items()}
    if prompt_kind(inputs) != "control":
        return inputs, None
    return inputs, ControlCall(read_control(inputs), outputs_asked_for(inputs))


def parse(
    request_id: str,
    inputs: Inputs,
    parameters: Mapping[str, Any],
    start: bool,
    tokenizer: Tokenizer,
    limits: EngineLimits,
    arrival: float,
) -> Call:
    """Parse and check a request for an answer. This takes time if the prompt is long.

    Args:
        request_id: the client's request id.
        inputs: the tensors from ``receive``.
        parameters: the client's request parameters.
        start: whether it starts a conversation.
        tokenizer: the model's tokenizer.
        limits: the engine's limits.
        arrival: its time of arrival (time.monotonic).

    Raises:
        InvalidArgument: an input is wrong. The message names the input or key.
    """
    kind = prompt_kind(inputs)
    outputs = outputs_asked_for(inputs)
    params = sampling_params(inputs, parameters, limits.vocab_size)
    options = read_options(inputs)
    kv = read_kv(inputs, limits.kv_dtype)
    stream = options.stream is not False
    echoes = kind == "text_input" and not stream and not options.exclude_input_in_output
    logprobs = None
    if "logprobs" in outputs:
        logprobs = params.logprobs or 0
    elif "cumulative_logprob" in outputs:
        logprobs = 0
    prompt = _prompt(kind, start, inputs, tokenizer, limits)
    return Call(
        request=Request(
            id=request_id,
            prompt_ids=prompt.ids,
            params=params,
            arrival=arrival,
            logprobs=logprobs,
            deadline=None if options.deadline_ms is None else arrival + options.deadline_ms / 1e3,
            priority=options.priority,
            cache_salt=options.cache_salt,
            retain_s=kv.retain_s,
        ),
        prompt=prompt,
        kv=kv.model_dump() if start or "kv" in inputs else None,
        interval_s=options.stream_interval_ms / 1e3 if stream else float("inf"),
        echo=one(inputs, "text_input") if echoes else "",
        outputs=outputs,
    )


def sampling_params(inputs: Inputs, parameters: Mapping[str, Any], vocab_size: int) -> SamplingParams:
    """Read and check the sampling keys. A tensor overrides the JSON, the JSON overrides a request parameter.

    Raises:
        InvalidArgument: a key is unknown or wrong. The message names it and what it takes.
    """
    keys: dict[str, Any] = {key: value for key, value in parameters.items() if key not in _NOT_SAMPLING}
    if "sampling_parameters" in inputs:
        text = one(inputs, "sampling_parameters")
        if len(text) > MAX_JSON:
            raise InvalidArgument("sampling_parameters", f"has {len(text)} characters; at most {MAX_JSON}")
        keys |= json_object("sampling_parameters", text)
    keys |= _sampling_tensors(inputs)
    params = validate(SamplingParams, keys, inputs=_NAMES)
    outside = [token for token in (*params.stop_token_ids, *params.logit_bias) if token >= vocab_size]
    if outside:
        key = "stop_token_ids" if outside[0] in params.stop_token_ids else "logit_bias"
        raise InvalidArgument(key, f"{outside[0]} is not a token; ids are 0 to {vocab_size - 1}")
    return params


def _sampling_tensors(inputs: Inputs) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for declared in _SAMPLING:
        if declared.name in inputs:
            if declared.key in keys:
                raise InvalidArgument(declared.name, f"is another name for {declared.key}; send one of them")
            keys[declared.key] = many(inputs, declared.name) if declared.many else one(inputs, declared.name)
    return keys


def _prompt(kind: str, start: bool, inputs: Inputs, tokenizer: Tokenizer, limits: EngineLimits) -> Prompt:
    if kind == "messages":
        longest = tokenizer.max_characters(limits.context_length)
        messages = parse_messages(one(inputs, "messages"), longest)
        if not start:
            return Prompt((), messages)
        rendered = tokenizer.render_chat(messages)
        return Prompt(tuple(tokenizer.encode_rendered(rendered, limits.context_length)), messages, rendered.text)
    if kind == "text_input":
        text = one(inputs, "text_input")
        if start or not text:
            return Prompt(tuple(tokenizer.encode(text, limits.context_length)))
        ids = tokenizer.encode_after(None, text, "text_input", limits.context_length)
        return Prompt(tuple(ids), text=text)
    # Checked before Python objects are made of the ids, so that a huge input is cheap to refuse
    limits.check_length(inputs["input_ids"].shape[1])
    ids = many(inputs, "input_ids")
    wrong = [token for token in ids if not 0 <= token < limits.vocab_size]
    if wrong:
        raise InvalidArgument("input_ids", f"{wrong[0]} is not a token; ids are 0 to {limits.vocab_size - 1}")
    return Prompt(tuple(ids))
