"""Reading a request's tensors, and the JSON objects that some of them hold: plain numpy, for both models."""

import json
import re
from collections.abc import Collection, Iterator, Mapping
from types import NoneType, UnionType
from typing import Annotated, Any, TypeVar, Union, get_args, get_origin

import numpy as np
from pydantic import BaseModel, ValidationError

from kvloom.errors import InvalidArgument
from kvloom.serving.interface import INPUTS, Part, inputs_of

MAX_BYTES = 2**24
"""The most bytes of a STRING input: decoding and parsing hold up everybody else."""

Inputs = Mapping[str, np.ndarray]
"""The inputs of a request by name, each of shape [1, n]."""

_NUMBERS = {
    int: re.compile(r"[+-]?[0-9]{1,30}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}
"""How numbers look in a string."""

Model = TypeVar("Model", bound=BaseModel)

_DECLARED = {declared.name: declared for declared in INPUTS}
_PROMPTS = [declared.name for declared in inputs_of(Part.PROMPT)]
_KEYS = {declared.name: declared.key for declared in inputs_of(Part.SAMPLING)}
_FLAGS = inputs_of(Part.OUTPUT)


def read(request: Any) -> Inputs:
    """The inputs of a ``pb_utils.InferenceRequest``.

    Raises:
        InvalidArgument: one has another shape than it should or is too long, or a config.pbtxt declares what kvloom
            does not know.
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, value in inputs.items():
        declared = _DECLARED.get(name)
        if declared is None:
            raise InvalidArgument(name, "is not an input of kvloom's, though the model's config.pbtxt declares it")
        if value.ndim != 2 or value.shape[0] != 1 or (value.shape[1] != 1 and not declared.many):
            raise InvalidArgument(name, f"has shape {list(value.shape)}; send {declared.shape}")
        if value.dtype == np.object_ and (size := sum(map(len, value.flat))) > MAX_BYTES:
            raise InvalidArgument(name, f"has {size} bytes; at most {MAX_BYTES}")
    return inputs


def prompt_kind(inputs: Inputs) -> str:
    """Which prompt a request has.

    Raises:
        InvalidArgument: none, or several.
    """
    given = [name for name in _PROMPTS if name in inputs]
    if len(given) != 1:
        raise InvalidArgument("inputs", f"send exactly one of {', '.join(_PROMPTS)}; got {', '.join(given) or 'none'}")
    return given[0]


def outputs_asked_for(inputs: Inputs) -> frozenset[str]:
    """Names of the optional outputs that a request asks for."""
    return frozenset(flag.key for flag in _FLAGS if flag.name in inputs and one(inputs, flag.name))


def many(inputs: Inputs, name: str) -> list[Any]:
    """The elements of an input as Python values; strings decoded.

    Raises:
        InvalidArgument: not UTF-8.
    """
    return [_decoded(name, item) if isinstance(item, bytes) else item for item in inputs[name][0].tolist()]


def one(inputs: Inputs, name: str) -> Any:
    """The only element of an input as a Python value; a string decoded.

    Raises:
        InvalidArgument: not UTF-8.
    """
    return many(inputs, name)[0]


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


def validate(
    model: type[Model],
    keys: Mapping[str, Any],
    field: str = "sampling_parameters",
    prefix: str = "",
    inputs: Collection[str] = (),
) -> Model:
    """Check keys against a pydantic model, as strictly as JSON can be checked.

    But "5" and "true" are 5 and true, and null is as good as absent.

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
        absent = {key for key, value in keys.items() if value is None and key in model.model_fields}
        given = {key: _plain(model, key, value) for key, value in keys.items() if key not in absent}
        return model.model_validate_json(json.dumps(given))
    except ValidationError as error:
        # without the context: a validator's own error in it, and its frames, would hold this request in a cycle
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = prefix + _printable(str(first["loc"][0])) if first["loc"] else field
        if first["type"] == "extra_forbidden":
            if key in inputs:
                hint = f"; the key is {_KEYS[key]}" if key in _KEYS else ""
                raise InvalidArgument(key, f"is an input of its own, and no sampling key{hint}") from error
            known = f"unknown key; known: {', '.join(model.model_fields)}"
            others = [name for name in inputs if name not in model.model_fields]
            raise InvalidArgument(key, known + (f"; inputs: {', '.join(others)}" if others else "")) from error
        raise InvalidArgument(key, first["msg"].removeprefix("Value error, ")) from error


def _plain(model: type[BaseModel], key: str, value: Any) -> Any:
    """A number or a boolean that a client wrote as a string, as genai-perf and vLLM's samples for Triton do."""
    if not isinstance(value, str) or key not in model.model_fields:
        return value
    kinds = {kind for kind in _kinds(model.model_fields[key].annotation) if kind is not NoneType}
    if kinds == {bool}:
        return {"true": True, "false": False}.get(value.strip().lower(), value)
    for kind, form in _NUMBERS.items():
        if kinds == {kind} and form.fullmatch(value.strip()):
            return kind(value)
    return value


def _kinds(annotation: Any) -> Iterator[Any]:
    """The plain types of a field."""
    if get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _kinds(kind)
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def _printable(key: str) -> str:
    """A client's own key, as an error may show it."""
    return ascii(key)[1:61] if len(key) > 60 or not key.isprintable() else key


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error
