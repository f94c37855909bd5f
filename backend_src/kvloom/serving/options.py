"""What a request asks for beside its prompt and its sampling: the cache, deadlines, how responses come."""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvloom.errors import InvalidArgument
from kvloom.serving.fields import Inputs, one
from kvloom.serving.sampling import json_object, validate


class Options(BaseModel):
    """The [1, 1] inputs of these names.

    Attributes:
        stream_interval_ms: least time between responses; 0: every token is one.
        priority: higher runs first.
        deadline_ms: time after which the answer so far is the answer.
        cache_salt: only requests of the same salt share prefixes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    stream_interval_ms: Annotated[int, Field(ge=0)] = 0
    priority: int = 0
    deadline_ms: Annotated[int, Field(ge=1)] | None = None
    cache_salt: str = ""


class KvOptions(BaseModel):
    """The keys of the `kv` JSON.

    Attributes:
        dtype: of the cache.
        policy: which blocks are dropped when.
        window: tokens that the sliding policy keeps.
        sinks: leading tokens that it keeps too.
        budget: tokens that the heavy-hitter policy keeps.
        retain_s: seconds for which the prompt's blocks are kept after the answer; -1: for ever.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    dtype: Literal["auto", "fp32", "bf16", "int8", "int4"] = "auto"
    policy: Literal["auto", "full", "sliding", "heavy_hitter"] = "auto"
    window: Annotated[int, Field(ge=1)] | None = None
    sinks: Annotated[int, Field(ge=0)] | None = None
    budget: Annotated[int, Field(ge=1)] | None = None
    retain_s: Annotated[float, Field(ge=-1)] = 0


def read_options(inputs: Inputs) -> Options:
    """Read and check the options.

    Raises:
        InvalidArgument: naming the input and what it takes.
    """
    return validate(Options, {name: one(inputs, name) for name in Options.model_fields if name in inputs})


def read_kv(inputs: Inputs, kv_dtype: str) -> KvOptions:
    """Read and check what a request asks of the cache.

    Args:
        inputs: of a request.
        kv_dtype: the dtype of the server's cache.

    Raises:
        InvalidArgument: naming the key that is wrong, or that this server's cache can't do.
    """
    kv = validate(KvOptions, json_object("kv", one(inputs, "kv")) if "kv" in inputs else {}, prefix="kv.")
    if 0 > kv.retain_s > -1:
        raise InvalidArgument("kv.retain_s", f"{kv.retain_s}: seconds, or -1 for ever")
    unsupported: dict[str, Any] = {}
    if kv.dtype not in ("auto", kv_dtype):
        unsupported["dtype"] = kv.dtype
    if kv.policy not in ("auto", "full"):
        unsupported["policy"] = kv.policy
    unsupported |= {key: value for key in ("window", "sinks", "budget") if (value := getattr(kv, key)) is not None}
    for key, value in unsupported.items():
        raise InvalidArgument(
            f"kv.{key}", f"{value!r} is not supported; this server's cache has dtype {kv_dtype} and policy full"
        )
    return kv
