"""Values of a config.json or of GGUF metadata, read with their type."""

from collections.abc import Mapping
from typing import Any, TypeVar

from kvloom.errors import ModelError

T = TypeVar("T", int, float, bool, str)


def typed(data: Mapping[str, Any], key: str, kind: type[T], default: T | None = None) -> T:
    """``data[key]`` as ``kind``; ``default`` where the key is absent or null. An integer is a float, too.

    Raises:
        ModelError: naming the key, if it is missing without a default or of another type.
    """
    value = data.get(key)
    if value is None:
        if default is None:
            raise ModelError(f"{key} is missing")
        return default
    if kind is float and type(value) is int:
        return kind(value)
    # `type(...) is`, because True is an int to isinstance
    if type(value) is not kind:
        raise ModelError(f"{key}={str(value)[:80]} must be {kind.__name__}")
    return value
