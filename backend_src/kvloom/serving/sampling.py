"""Sampling parameters from the three places a request may put them: request parameters, JSON, tensors."""

import json
from collections.abc import Collection, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kvloom.errors import InvalidArgument
from kvloom.request import SamplingParams
from kvloom.serving.fields import PROMPTS, RETURNED, Inputs, many, one

Model = TypeVar("Model", bound=BaseModel)

WORDS = {"stop_words": "stop", "bad_words": "bad_words"}
"""STRING [1, n] tensors and the keys they set."""

SCALARS = {
    "max_tokens": "max_tokens",
    "min_tokens": "min_tokens",
    "min_length": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "repetition_penalty": "repetition_penalty",
    "presence_penalty": "presence_penalty",
    "frequency_penalty": "frequency_penalty",
    "length_penalty": "length_penalty",
    "seed": "seed",
    "random_seed": "seed",
    "beam_width": "beam_width",
}
"""[1, 1] tensors and the keys they set."""

INPUTS = (
    *PROMPTS,
    "stream",
    "sampling_parameters",
    *SCALARS,
    *WORDS,
    "exclude_input_in_output",
    *RETURNED,
    "kv",
    "stream_interval_ms",
    "priority",
    "deadline_ms",
    "cache_salt",
)
"""Every input of both models."""

MAX_JSON = 2**20
"""The most characters of the sampling JSON: parsing holds up everybody else."""

_NOT_SAMPLING = {"id"}
"""Request parameters that Triton's HTTP endpoint adds itself."""


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
    keys |= _from_tensors(inputs)
    params = validate(SamplingParams, keys, inputs=INPUTS)
    outside = [token for token in (*params.stop_token_ids, *params.logit_bias) if token >= vocab_size]
    if outside:
        key = "stop_token_ids" if outside[0] in params.stop_token_ids else "logit_bias"
        raise InvalidArgument(key, f"{outside[0]} is not a token; ids are 0 to {vocab_size - 1}")
    return params


def validate(
    model: type[Model],
    keys: Mapping[str, Any],
    field: str = "sampling_parameters",
    prefix: str = "",
    inputs: Collection[str] = (),
) -> Model:
    """Check keys against a pydantic model, as strictly as JSON can be checked.

    Args:
        model: what the keys may be.
        keys: a client's.
        field: the input that they are of, named where no single key is at fault.
        prefix: comes before a key's name in errors.
        inputs: names that a key may have been meant for, as a tensor.

    Raises:
        InvalidArgument: in the contract's form, for the first key at fault.
    """
    try:
        # through JSON, where a list is a tuple and "5" is the only way to write the key 5
        return model.model_validate_json(json.dumps(keys))
    except ValidationError as error:
        # without the context: a validator's own error in it, and its frames, would hold this request in a cycle
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = prefix + _printable(str(first["loc"][0])) if first["loc"] else field
        if first["type"] == "extra_forbidden":
            if key in inputs:
                called = (SCALARS | WORDS).get(key)
                hint = f"; the key is {called}" if called else ""
                raise InvalidArgument(key, f"is an input of its own, and no sampling key{hint}") from error
            known = f"unknown key; known: {', '.join(model.model_fields)}"
            others = [name for name in inputs if name not in model.model_fields]
            raise InvalidArgument(key, known + (f"; inputs: {', '.join(others)}" if others else "")) from error
        raise InvalidArgument(key, first["msg"].removeprefix("Value error, ")) from error


def _from_tensors(inputs: Inputs) -> dict[str, Any]:
    keys: dict[str, Any] = {}
    for name, key in (SCALARS | WORDS).items():
        if name in inputs:
            if key in keys:
                raise InvalidArgument(name, f"is another name for {key}; send one of them")
            keys[key] = many(inputs, name) if name in WORDS else one(inputs, name)
    return keys


def json_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidArgument: it is not one.
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(name, f"not valid JSON: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(name, "must be a JSON object")
    return value


def _printable(key: str) -> str:
    """A client's own key, as an error may show it."""
    return ascii(key)[1:61] if len(key) > 60 or not key.isprintable() else key
