"""Names of inputs and outputs, and reading them from tensors: plain numpy, for both models."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from kvloom.errors import InvalidArgument

PROMPTS = ("text_input", "messages", "input_ids", "control")
"""Exactly one of them is in every request."""

RETURNED = {
    "return_finish_reason": "finish_reason",
    "return_num_input_tokens": "num_input_tokens",
    "return_num_output_tokens": "num_output_tokens",
    "return_logprobs": "logprobs",
    "return_cumulative_logprob": "cumulative_logprob",
    "return_token_ids": "token_ids",
    "return_usage": "usage",
}
"""The flag that asks for each optional output."""

Inputs = Mapping[str, np.ndarray]


MAX_BYTES = 2**24
"""The most bytes of a STRING input: decoding and parsing hold up everybody else."""

LISTS = frozenset(("input_ids", "stop_words", "bad_words"))
"""Inputs of shape [1, n]; all others are [1, 1]."""


def read(request: Any) -> dict[str, np.ndarray]:
    """The inputs of a ``pb_utils.InferenceRequest`` by name.

    Raises:
        InvalidArgument: one has another shape than it should, or is too long.
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, value in inputs.items():
        if value.ndim != 2 or value.shape[0] != 1 or (value.shape[1] != 1 and name not in LISTS):
            raise InvalidArgument(
                name, f"has shape {list(value.shape)}; send {'[1, n]' if name in LISTS else '[1, 1]'}"
            )
        if value.dtype == np.object_ and (size := sum(map(len, value.flat))) > MAX_BYTES:
            raise InvalidArgument(name, f"has {size} bytes; at most {MAX_BYTES}")
    return inputs


def prompt_kind(inputs: Inputs) -> str:
    """Which of ``PROMPTS`` a request has.

    Raises:
        InvalidArgument: none, or several.
    """
    given = [name for name in PROMPTS if name in inputs]
    if len(given) != 1:
        raise InvalidArgument("inputs", f"send exactly one of {', '.join(PROMPTS)}; got {', '.join(given) or 'none'}")
    return given[0]


def many(inputs: Inputs, name: str) -> list[Any]:
    """The elements of a [1, n] tensor as Python values; strings decoded.

    Raises:
        InvalidArgument: not UTF-8.
    """
    return [_decoded(name, item) if isinstance(item, bytes) else item for item in inputs[name][0].tolist()]


def one(inputs: Inputs, name: str) -> Any:
    """The only element of a [1, 1] tensor as a Python value; a string decoded.

    Raises:
        InvalidArgument: not UTF-8.
    """
    return many(inputs, name)[0]


def flag(inputs: Inputs, name: str, default: bool) -> bool:
    """A BOOL input, or ``default`` where it is absent."""
    return bool(one(inputs, name)) if name in inputs else default


def returned(inputs: Inputs) -> frozenset[str]:
    """Names of the optional outputs that were asked for."""
    return frozenset(output for name, output in RETURNED.items() if flag(inputs, name, False))


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error
