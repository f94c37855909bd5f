"""Tensors to typed requests and back, for `llm`."""

import dataclasses
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kvloom.errors import InvalidArgument
from kvloom.request import Delta, Request, Sequence
from kvloom.scheduling.admission import Limits
from kvloom.serving.fields import Inputs, flag, many, one, returned
from kvloom.serving.options import read_kv, read_options
from kvloom.serving.sampling import sampling_params
from kvloom.serving.sender import string
from kvloom.text.chat import Message, parse_messages
from kvloom.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came through Triton.

    Attributes:
        request: what the engine shall do; without a prompt, where that depends on the conversation.
        messages: the new messages, where the prompt is of that kind.
        rendered: for a start with messages: what the chat template made of them.
        text: for a later turn of raw text: that text, whose tokens depend on how the turn before it ends. Those of the
            request's prompt follow ordinary text.
        kv: what it asks of the cache; None where a turn leaves that to the conversation's first one.
        interval_s: least time between responses; infinite for an answer that is sent whole.
        echo: what the answer begins with.
        outputs: names of the optional outputs that were asked for.
    """

    request: Request
    messages: list[Message] | None
    rendered: str
    text: str
    kv: dict[str, object] | None
    interval_s: float
    echo: str
    outputs: frozenset[str]


def decode(
    request: Any,
    parameters: Mapping[str, Any],
    kind: str,
    start: bool,
    inputs: Inputs,
    tokenizer: Tokenizer,
    limits: Limits,
    arrival: float,
) -> Call:
    """Read a ``pb_utils.InferenceRequest`` with a prompt.

    Args:
        request: the request.
        parameters: the client's request parameters.
        kind: which prompt it has.
        start: it begins a conversation.
        inputs: its inputs.
        tokenizer: of the model.
        limits: of the engine.
        arrival: when it came (time.monotonic).

    Raises:
        InvalidArgument: naming the input or key at fault.
    """
    params = sampling_params(inputs, parameters, limits.vocab_size)
    options = read_options(inputs)
    kv = read_kv(inputs, limits.kv_dtype)
    outputs = returned(inputs)
    stream = flag(inputs, "stream", True)
    echoes = kind == "text_input" and not stream and not flag(inputs, "exclude_input_in_output", False)
    logprobs = None
    if "logprobs" in outputs:
        logprobs = params.logprobs or 0
    elif "cumulative_logprob" in outputs:
        logprobs = 0
    messages = (
        parse_messages(one(inputs, "messages"), tokenizer.max_characters(limits.context_length))
        if kind == "messages"
        else None
    )
    rendered = tokenizer.render_chat(messages) if messages is not None and start else ""
    if messages is None:
        ids = _prompt_ids(kind, start, inputs, tokenizer, limits)
    else:
        # what a later turn adds depends on how the one before it ends
        ids = tokenizer.encode_rendered(rendered, limits.context_length) if start else []
    return Call(
        request=Request(
            id=request.request_id(),
            prompt_ids=tuple(ids),
            params=params,
            arrival=arrival,
            logprobs=logprobs,
            deadline=None if options.deadline_ms is None else arrival + options.deadline_ms / 1e3,
            priority=options.priority,
            cache_salt=options.cache_salt,
            retain_s=kv.retain_s,
        ),
        messages=messages,
        rendered=rendered,
        text=one(inputs, "text_input") if kind == "text_input" and not start else "",
        kv=kv.model_dump() if start or "kv" in inputs else None,
        interval_s=options.stream_interval_ms / 1e3 if stream else float("inf"),
        echo=one(inputs, "text_input") if echoes else "",
        outputs=outputs,
    )


def encoder(
    outputs: frozenset[str], tokenizer: Tokenizer, sequence: Sequence | None = None, echo: str = ""
) -> Callable[[Delta], list[Any]]:
    """Makes the output tensors (``pb_utils.Tensor``, each [1, n]) of one answer's responses, in their order.

    Args:
        outputs: names of the optional outputs that were asked for.
        tokenizer: of the model.
        sequence: the answer's; its prompt may become known later.
        echo: what the answer begins with.
    """
    cumulative = 0.0
    # a tensor takes longer to make than to send; those that say the same again are sent again
    kept: dict[str, tuple[object, Any]] = {}

    def keep(name: str, value: object, make: Callable[[], Any]) -> Any:
        if name not in kept or kept[name][0] != value:
            kept[name] = (value, make())
        return kept[name][1]

    def count(name: str, value: int) -> Any:
        return keep(name, value, lambda: pb_utils.Tensor(name, np.array([[value]], dtype=np.uint32)))

    def encode(delta: Delta) -> list[Any]:
        nonlocal echo, cumulative
        tensors = [string("text_output", echo + delta.text)]
        echo = ""
        if "finish_reason" in outputs:
            reason = delta.finish_reason or ""
            tensors.append(keep("finish_reason", reason, lambda: string("finish_reason", reason)))
        if "num_input_tokens" in outputs:
            tensors.append(count("num_input_tokens", 0 if sequence is None else len(sequence.request.prompt_ids)))
        if "num_output_tokens" in outputs:
            tensors.append(count("num_output_tokens", len(delta.tokens)))
        if "token_ids" in outputs:
            tensors.append(pb_utils.Tensor("token_ids", np.array([delta.token_ids], dtype=np.int32)))
        if "cumulative_logprob" in outputs:
            cumulative += sum(token.logprob or 0.0 for token in delta.tokens)
            tensors.append(pb_utils.Tensor("cumulative_logprob", np.array([[cumulative]], dtype=np.float32)))
        if "logprobs" in outputs:
            tensors.append(string("logprobs", json.dumps(_logprobs(delta, tokenizer))))
        if "usage" in outputs and delta.usage is not None:
            tensors.append(string("usage", json.dumps(dataclasses.asdict(delta.usage))))
        return tensors

    return encode


def _logprobs(delta: Delta, tokenizer: Tokenizer) -> list[dict[str, Any]]:
    def entry(token: int, logprob: float | None) -> dict[str, Any]:
        return {"id": token, "text": tokenizer.decode([token], skip_special_tokens=False), "logprob": logprob}

    return [entry(token.id, token.logprob) | {"top": [entry(*top) for top in token.top]} for token in delta.tokens]


def _prompt_ids(kind: str, start: bool, inputs: Inputs, tokenizer: Tokenizer, limits: Limits) -> list[int]:
    if kind == "text_input":
        text = one(inputs, "text_input")
        if start or not text:
            return tokenizer.encode(text, limits.context_length)
        return tokenizer.encode_after(None, text, "text_input", limits.context_length)
    # before a Python object is made of each
    limits.check_length(inputs["input_ids"].shape[1])
    ids = many(inputs, "input_ids")
    wrong = [token for token in ids if not 0 <= token < limits.vocab_size]
    if wrong:
        raise InvalidArgument("input_ids", f"{wrong[0]} is not a token; ids are 0 to {limits.vocab_size - 1}")
    return ids
