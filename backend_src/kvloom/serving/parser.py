"""From a request's tensors to what it asks for, or to the error that says what is wrong with it. Used by `llm`."""

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
"""The most characters of the sampling JSON: parsing holds up everybody else."""

_NAMES = [declared.name for declared in INPUTS]
_SAMPLING = inputs_of(Part.SAMPLING)
_NOT_SAMPLING = {"id"}
"""Request parameters that Triton's HTTP endpoint adds itself."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """What a request adds to its conversation.

    Attributes:
        ids: its tokens; none for messages of a later turn, which depend on how the turn before it ends.
        messages: the new messages, where it is of that kind.
        rendered: for a start with messages: what the chat template made of them.
        text: for a later turn of raw text: that text, whose tokens depend on how the turn before it ends. ``ids``
            follow ordinary text.
    """

    ids: tuple[int, ...]
    messages: list[Message] | None = None
    rendered: str = ""
    text: str = ""


@dataclass(frozen=True, slots=True)
class Call:
    """A request for an answer, as it came through Triton.

    Attributes:
        request: what the engine shall do.
        prompt: what it is given.
        kv: what it asks of the cache; None where a turn leaves that to the conversation's first one.
        interval_s: least time between responses; infinite for an answer that is sent whole.
        echo: what the answer begins with.
        outputs: names of the optional outputs that were asked for.
    """

    request: Request
    prompt: Prompt
    kv: dict[str, object] | None
    interval_s: float
    echo: str
    outputs: frozenset[str]


@dataclass(frozen=True, slots=True)
class ControlCall:
    """A request to do something else than to answer.

    Attributes:
        control: what to do.
        outputs: names of the optional outputs that were asked for.
    """

    control: Control
    outputs: frozenset[str]


def receive(request: Any) -> tuple[Inputs, ControlCall | None]:
    """Take a ``pb_utils.InferenceRequest`` over: what tells where it belongs. The one way in for what a client sends.

    Returns:
        Its tensors, which are copies: what the request holds lies in shared memory that is Triton's. And what it asks
        for where that is not an answer; None: ``parse`` reads the rest.

    Raises:
        InvalidArgument: naming the input or key at fault.
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
    """Read and check a request for an answer; takes time for a long prompt.

    Args:
        request_id: the client's name for it.
        inputs: what ``receive`` found.
        parameters: the client's request parameters.
        start: it begins a conversation.
        tokenizer: of the model.
        limits: of the engine.
        arrival: when it came (time.monotonic).

    Raises:
        InvalidArgument: naming the input or key at fault.
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
    """Read and check how to sample; a tensor beats the JSON, the JSON beats a request parameter.

    Raises:
        InvalidArgument: naming the key and what it takes.
    """
    keys: dict[str, Any] = {key: value for key, value in parameters.items() if key not in _NOT_SAMPLING}
    if "sampling_parameters" in inputs:
        text = one(inputs, "sampling_parameters")
        if len(text) > MAX_JSON:
            raise InvalidArgument("sampling_parameters", f"at most {MAX_JSON} characters, not {len(text)}")
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
    # before a Python object is made of each
    limits.check_length(inputs["input_ids"].shape[1])
    ids = many(inputs, "input_ids")
    wrong = [token for token in ids if not 0 <= token < limits.vocab_size]
    if wrong:
        raise InvalidArgument("input_ids", f"{wrong[0]} is not a token; ids are 0 to {limits.vocab_size - 1}")
    return Prompt(tuple(ids))
