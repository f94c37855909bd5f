"""Reads a request's tensors and the JSON objects in them. Both models use it; it needs only numpy."""

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
"""Maximum size of a STRING input in bytes. Decoding and parsing it delays all other requests."""

Inputs = Mapping[str, np.ndarray]
"""A request's inputs by name, each of shape [1, n]."""

_NUMBERS = {
    int: re.compile(r"[+-]?[0-9]{1,30}"),
    float: re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?"),
}
"""The forms of numbers that clients may write as strings."""

Model = TypeVar("Model", bound=BaseModel)

_DECLARED = {declared.name: declared for declared in INPUTS}
_PROMPTS = [declared.name for declared in inputs_of(Part.PROMPT)]
_KEYS = {declared.name: declared.key for declared in inputs_of(Part.SAMPLING)}
_FLAGS = inputs_of(Part.OUTPUT)


def read(request: Any) -> Inputs:
    """Read the inputs of a ``pb_utils.InferenceRequest``.

    Raises:
        InvalidArgument: an input has a wrong shape or is too long, or kvloom does not know it, though config.pbtxt
            declares it.
    """
    inputs = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
    for name, value in inputs.items():
        declared = _DECLARED.get(name)
        if declared is None:
            raise InvalidArgument(name, "kvloom has no such input, though the model's config.pbtxt declares it")
        if value.ndim != 2 or value.shape[0] != 1 or (value.shape[1] != 1 and not declared.many):
            raise InvalidArgument(name, f"has shape {list(value.shape)}; send {declared.shape}")
        if value.dtype == np.object_ and (size := sum(map(len, value.flat))) > MAX_BYTES:
            raise InvalidArgument(name, f"has {size} bytes; at most {MAX_BYTES}")
    return inputs


def prompt_kind(inputs: Inputs) -> str:
    """The name of the input that is the request's prompt.

    Raises:
        InvalidArgument: the request has none or several of them.
    """
    given = [name for name in _PROMPTS if name in inputs]
    if len(given) != 1:
        raise InvalidArgument("inputs", f"send exactly one of {', '.join(_PROMPTS)}; got {', '.join(given) or 'none'}")
    return given[0]


def outputs_asked_for(inputs: Inputs) -> frozenset[str]:
    """The names of the optional outputs that a request asks for."""
    return frozenset(flag.key for flag in _FLAGS if flag.name in inputs and one(inputs, flag.name))


def many(inputs: Inputs, name: str) -> list[Any]:
    """The elements of an input as Python values, with strings decoded.

    Raises:
        InvalidArgument: a string is not UTF-8.
    """
    return [_decoded(name, item) if isinstance(item, bytes) else item for item in inputs[name][0].tolist()]


def one(inputs: Inputs, name: str) -> Any:
    """The only element of an input as a Python value, with a string decoded.

    Raises:
        InvalidArgument: the string is not UTF-8.
    """
    return many(inputs, name)[0]


def json_object(name: str, text: str) -> dict[str, Any]:
    """Parse a JSON object.

    Raises:
        InvalidArgument: the text is not a JSON object.
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
    """Check a client's keys against a pydantic model.

    Types are checked strictly, except that "5" and "true" count as 5 and true, and null as absent.

    Args:
        model: the pydantic model.
        keys: the client's keys and values.
        field: the name of the input that holds the keys. Errors name it if they concern no single key.
        prefix: put before a key's name in errors.
        inputs: the names of all inputs. If an unknown key is one of them, the error says so.

    Raises:
        InvalidArgument: a key is unknown or wrong. The message names the first one.
    """
    try:
        # Validated as JSON, because strict mode then takes a list for a tuple and the key "5" for 5
        absent = {key for key, value in keys.items() if value is None and key in model.model_fields}
        given = {key: _plain(model, key, value) for key, value in keys.items() if key not in absent}
        return model.model_validate_json(json.dumps(given))
    except ValidationError as error:
        # Without the context: it holds the validator's own error, whose frames would keep the request in a cycle
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        key = prefix + _printable(str(first["loc"][0])) if first["loc"] else field
        if first["type"] == "extra_forbidden":
            if key in inputs:
                hint = f"; the key is {_KEYS[key]}" if key in _KEYS else ""
                raise InvalidArgument(key, f"is an input of its own, not a sampling key{hint}") from error
            known = f"unknown key; known: {', '.join(model.model_fields)}"
            others = [name for name in inputs if name not in model.model_fields]
            raise InvalidArgument(key, known + (f"; inputs: {', '.join(others)}" if others else "")) from error
        raise InvalidArgument(key, first["msg"].removeprefix("Value error, ")) from error


def _plain(model: type[BaseModel], key: str, value: Any) -> Any:
    """Convert a string to a number or a boolean if the key takes one. genai-perf and vLLM's samples send strings."""
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
    """The types in a field's annotation, without unions and constraints."""
    if get_origin(annotation) in (Union, UnionType):
        for kind in get_args(annotation):
            yield from _kinds(kind)
    elif get_origin(annotation) is Annotated:
        yield from _kinds(get_args(annotation)[0])
    else:
        yield annotation


def _printable(key: str) -> str:
    """A client's key in a form that is safe in an error message."""
    return ascii(key)[1:61] if len(key) > 60 or not key.isprintable() else key


def _decoded(name: str, content: bytes) -> str:
    try:
        return content.decode()
    except UnicodeDecodeError as error:
        raise InvalidArgument(name, f"is not UTF-8: {error.reason} at byte {error.start}") from error
