"""Tensors to typed requests and back: the one place that knows the names of inputs and outputs."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils
from pydantic import ValidationError

from kvloom.chat import parse_messages
from kvloom.errors import InvalidArgument
from kvloom.request import Delta, Request, SamplingParams
from kvloom.tokenizer import Tokenizer

PROMPTS = ("text_input", "messages", "input_ids")
OPTIONAL_OUTPUTS = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_token_ids": "token_ids",
}


@dataclass(frozen=True, slots=True)
class Call:
    """A request as it came through Triton.

    Attributes:
        request: what the engine shall do.
        stream: whether deltas are sent as they come, or one answer at the end.
        echo: what a non-streamed answer begins with.
        outputs: names of the optional outputs that were asked for.
    """

    request: Request
    stream: bool
    echo: str
    outputs: frozenset[str]


def decode(request: Any, tokenizer: Tokenizer) -> Call:
    """Read a ``pb_utils.InferenceRequest``.

    Raises:
        InvalidArgument: naming the input or key at fault.
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    given = [name for name in PROMPTS if name in inputs]
    if len(given) != 1:
        raise InvalidArgument("inputs", f"send exactly one of {', '.join(PROMPTS)}; got {', '.join(given) or 'none'}")
    echo = ""
    if given == ["text_input"]:
        text = _text(inputs, "text_input")
        prompt_ids = tokenizer.encode(text)
        if not _flag(inputs, "exclude_input_in_output", False):
            echo = text
    elif given == ["messages"]:
        prompt_ids = tokenizer.encode_chat(parse_messages(_text(inputs, "messages")))
    else:
        prompt_ids = _token_ids(inputs["input_ids"], tokenizer.vocab_size)
    params = SamplingParams()
    if "sampling_parameters" in inputs:
        params = parse_sampling(_text(inputs, "sampling_parameters"))
    return Call(
        request=Request(id=request.request_id(), prompt_ids=tuple(prompt_ids), params=params, arrival=time.monotonic()),
        stream=_flag(inputs, "stream", True),
        echo=echo,
        outputs=frozenset(output for flag, output in OPTIONAL_OUTPUTS.items() if _flag(inputs, flag, False)),
    )


def encode(call: Call, delta: Delta) -> list[Any]:
    """A response's output tensors (``pb_utils.Tensor``), each of shape [1, n]."""
    values: dict[str, np.ndarray] = {
        "finish_reason": _string(delta.finish_reason or ""),
        "num_input_tokens": np.array([[len(call.request.prompt_ids)]], dtype=np.uint32),
        "num_output_tokens": np.array([[len(delta.token_ids)]], dtype=np.uint32),
        "token_ids": np.array([delta.token_ids], dtype=np.int32),
    }
    tensors = [pb_utils.Tensor("text_output", _string(delta.text))]
    return tensors + [pb_utils.Tensor(name, value) for name, value in values.items() if name in call.outputs]


def parse_sampling(text: str) -> SamplingParams:
    """Read the sampling JSON.

    Raises:
        InvalidArgument: naming the key and what it takes.
    """
    try:
        return SamplingParams.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        key = str(first["loc"][0]) if first["loc"] else "sampling_parameters"
        if first["type"] == "extra_forbidden":
            raise InvalidArgument(key, f"unknown key; known: {', '.join(SamplingParams.model_fields)}") from error
        raise InvalidArgument(key, first["msg"]) from error


def _one(inputs: Mapping[str, np.ndarray], name: str) -> Any:
    """The only element of a [1, 1] tensor."""
    value = inputs[name]
    if value.shape != (1, 1):
        raise InvalidArgument(name, f"has shape {list(value.shape)}; send [1, 1]")
    return value[0, 0]


def _text(inputs: Mapping[str, np.ndarray], name: str) -> str:
    try:
        return _one(inputs, name).decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def _flag(inputs: Mapping[str, np.ndarray], name: str, default: bool) -> bool:
    return bool(_one(inputs, name)) if name in inputs else default


def _token_ids(value: np.ndarray, vocab_size: int) -> list[int]:
    if value.ndim != 2 or value.shape[0] != 1:
        raise InvalidArgument("input_ids", f"has shape {list(value.shape)}; send [1, n]")
    wrong = value[(value < 0) | (value >= vocab_size)]
    if wrong.size:
        raise InvalidArgument("input_ids", f"{wrong[0]} is not a token; ids are 0 to {vocab_size - 1}")
    return value[0].tolist()


def _string(text: str) -> np.ndarray:
    return np.array([[text.encode()]], dtype=np.object_)
