"""Reads typed values from config.json or GGUF metadata."""

from collections.abc import Mapping
from typing import Any, TypeVar

from kvloom.errors import ModelError

T = TypeVar("T", int, float, bool, str)


def typed(data: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """``data[key]`` as ``kind``, or ``default`` if the key is absent or null. An integer is accepted as a float.

    Raises:
        ModelError: the key has no value and no default, or a value of another type.
    """
    value = data.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"{key} is missing")
        return default
    if kind is float and type(value) is int:
        return kind(value)
    # `type(...) is` instead of isinstance, because True is an instance of int
    if type(value) is not kind:
        raise ModelError(f"{key}={str(value)[:80]} must be {kind.__name__}")
    return value
