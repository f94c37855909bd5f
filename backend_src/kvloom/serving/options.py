"""A request's options beside its prompt and sampling keys: KV cache, deadline, priority, streaming."""

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvloom.errors import InvalidArgument
from kvloom.serving.inputs import Inputs, json_object, one, validate
from kvloom.serving.interface import Part, inputs_of

_NAMES = [declared.name for declared in inputs_of(Part.OPTION)]


class Options(BaseModel):
    """The option inputs; ``interface`` describes each of them.

    Attributes:
        stream: None for the model's default.
        stream_interval_ms: 0 to send every token.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stream: bool | None = None
    exclude_input_in_output: bool = False
    stream_interval_ms: Annotated[int, Field(ge=0)] = 0
    priority: int = 0
    deadline_ms: Annotated[int, Field(ge=1)] | None = None
    cache_salt: str = ""


class KvOptions(BaseModel):
    """The keys of the `kv` JSON.

    Attributes:
        dtype: the dtype of the cache.
        policy: the eviction policy. Only ``full`` exists, which evicts nothing.
        retain_s: seconds for which the prompt's blocks are kept after the answer. -1 keeps them for ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    policy: Literal["auto", "full"] = "auto"
    retain_s: Annotated[float, Field(ge=-1)] = 0


def read_options(inputs: Inputs) -> Options:
    """Read and check the options.

    Raises:
        InvalidArgument: an option is wrong. The message names it and what it takes.
    """
    return validate(Options, {name: one(inputs, name) for name in _NAMES if name in inputs})


def read_kv(inputs: Inputs, kv_dtype: str) -> KvOptions:
    """Read and check the `kv` input.

    Args:
        inputs: the request's inputs.
        kv_dtype: the dtype of the server's KV cache.

    Raises:
        InvalidArgument: a key is wrong, or this server's cache does not support it. The message names the key.
    """
    kv = validate(KvOptions, json_object("kv", one(inputs, "kv")) if "kv" in inputs else {}, "kv", prefix="kv.")
    if 0 > kv.retain_s > -1:
        raise InvalidArgument("kv.retain_s", f"{kv.retain_s} is neither a number of seconds nor -1, which is for ever")
    if kv.dtype not in ("auto", kv_dtype):
        raise InvalidArgument("kv.dtype", f"{kv.dtype!r}: this server's cache is {kv_dtype} (setting kv_dtype)")
    return kv
