"""The server's settings: one frozen object, read once from the `parameters` of llm's config.pbtxt."""

import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvloom.cores import usable_cores
from kvloom.errors import SettingsError

SPARE_SLOTS = 1200
"""Triton sequences that are reserved for dropped conversations and control requests."""

TRITONS = re.compile("EXECUTION_ENV_PATH|FORCE_CPU_ONLY_INPUT_TENSORS|TRITON_[A-Z_]+")
"""Parameters in config.pbtxt that belong to Triton or its Python backend."""

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """The settings. Their values arrive as strings from config.pbtxt.

    The docstring of a field is its line in the README and in `kvloom serve --help`, in Markdown.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    model: str = "default"
    """`default` (SmolLM2-135M-Instruct, downloaded once), a Hugging Face folder (config.json, safetensors,
    tokenizer.json) or a GGUF file; Llama architecture"""
    device: str = "auto"
    """`cpu`, or a GPU like `cuda:0`; `auto` is `cuda:0` if torch finds a GPU. A missing GPU is an error, never replaced
    by the CPU"""
    weights: Literal["auto", "fp32", "bf16", "int8", "int4", "w8a8"] = "auto"
    """`fp32`, `bf16`, `int8`, `int4` (from a GGUF file) or `w8a8` (on a CPU); `auto` is bf16 on a GPU and on a CPU with
    bf16 instructions, else fp32. `fp32` makes activations and cache fp32 too"""
    kv_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    """dtype of the cache, `fp32` or `bf16`; `auto` follows the activations"""
    kv_memory: str = "auto"
    """size of the block pool, like `512MiB` or `60%` of the free memory; `auto` takes the memory that weights, a step
    and `swap_memory` leave free"""
    kv_blocks: NonNegative = 0
    """number of blocks in the pool; overrides `kv_memory`; 0 is off"""
    swap_memory: str = "512MiB"
    """host memory for the blocks of preempted sequences, like `512MiB`; with 0 they are recomputed"""
    retain_memory: str = "0"
    """maximum memory of the pool that `kv.retain_s` may retain, like `64MiB`; 0 refuses `retain_s`"""
    block_size: Positive = 32
    """tokens per block, a power of two"""
    context_length: NonNegative = 0
    """maximum length of a sequence in tokens; 0 takes the model's"""
    max_batch_tokens: Positive = 512
    """maximum tokens per step; longer prompts are computed in chunks, together with running answers"""
    max_running: Positive = 64
    """maximum sequences per step; each takes at least one of `max_batch_tokens`"""
    max_queue: Positive = 1024
    """maximum waiting requests, not counting those that can start at once; further requests are refused"""
    queue_timeout_ms: NonNegative = 0
    """maximum wait for the first step; 0 is no limit"""
    max_conversations: Positive = 1024
    """maximum number of conversations; a further one drops the least recently used idle one"""
    conversation_idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600
    """a conversation is dropped after this many idle seconds; 0 is never"""
    journal_dir: str = ""
    """folder where the tokens and messages of conversations are saved for a restart; `kvloom serve` uses a temporary
    one"""
    chat_special_tokens: bool = False
    """`true` turns text in `messages` that spells special tokens into special tokens, so that a user's text can end a
    turn and begin another"""
    prefix_cache: bool = True
    """requests that begin with the same tokens share blocks"""
    threads: NonNegative = 0
    """CPU threads of a step; 0 uses all cores that the server may use, but no more than a container's CPU quota allows:
    one for a quota of 1.5"""
    stuck_after_s: NonNegative = 30
    """`kvloom serve` restarts tritonserver if no step has finished for this long; 0 is never"""
    admin_token: str = ""
    """the token that allows `drain`, or `sha256:` and its digest; several are separated by commas"""
    test_fail_after_tokens: NonNegative = 0
    """tests only: requests with an id that begins with `test-fail` fail after this many tokens"""
    test_block_hash: Literal["", "constant", "mod7"] = ""
    """tests only: a weak hash for the prefix cache"""

    @field_validator("block_size")
    @classmethod
    def _power_of_two(cls, value: int) -> int:
        if value & (value - 1):
            raise ValueError("must be a power of two")
        return value

    @field_validator("device")
    @classmethod
    def _device(cls, value: str) -> str:
        if not re.fullmatch(r"auto|cpu|cuda:\d+", value):
            raise ValueError('must be "auto", "cpu" or a GPU like "cuda:0"')
        return value

    @field_validator("kv_memory")
    @classmethod
    def _size(cls, value: str) -> str:
        if not re.fullmatch(r"auto|\d+(\.\d+)?\s*([KMGT]i?B|B|%)", value):
            raise ValueError('must be "auto", a size like "512MiB" or a share of the free memory like "60%"')
        return value

    @field_validator("swap_memory", "retain_memory")
    @classmethod
    def _size_or_off(cls, value: str) -> str:
        if not re.fullmatch(r"0|\d+(\.\d+)?\s*([KMGT]i?B|B)", value):
            raise ValueError('must be a size like "512MiB", or 0 to turn it off')
        return value

    @property
    def step_threads(self) -> int:
        """``threads``, or else the number of cores that this process may keep busy. A container may limit them."""
        return self.threads or usable_cores().count

    @classmethod
    def names(cls) -> list[str]:
        """The names of all settings except those for tests."""
        return [name for name in cls.model_fields if not name.startswith("test_")]

    @classmethod
    def described(cls) -> list[tuple[str, str, str]]:
        """The name, default and description of each setting in ``names``. The default is in config.pbtxt's form."""
        return [
            (name, _written(field.default), " ".join((field.description or "").split()))
            for name, field in cls.model_fields.items()
            if name in cls.names()
        ]

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> "Settings":
        """Read settings from strings. Triton's own parameters are ignored.

        Raises:
            SettingsError: a setting is unknown or wrong. The message names it and what it takes.
        """
        parameters = {key: value for key, value in parameters.items() if not TRITONS.fullmatch(key)}
        unknown = sorted(set(parameters) - set(cls.model_fields))
        if unknown:
            raise SettingsError(f"unknown setting {unknown[0]!r}; known: {', '.join(cls.names())}")
        try:
            settings = cls.model_validate(dict(parameters))
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(map(str, first["loc"]))
            raise SettingsError(
                f"setting {name}={parameters[name]!r}: {first['msg'].removeprefix('Value error, ')}"
            ) from error
        if settings.weights == "fp32" and settings.kv_dtype == "bf16":
            raise SettingsError("setting kv_dtype='bf16': weights=fp32 makes the cache fp32 too; change one of them")
        if settings.retain_memory != "0" and not settings.prefix_cache:
            raise SettingsError(
                f"setting retain_memory={settings.retain_memory!r}: retaining needs prefix_cache; set prefix_cache=true"
            )
        return settings

    def check_slots(self, kept: int) -> None:
        """Check that Triton keeps enough sequences for these settings.

        Args:
            kept: ``max_candidate_sequences`` in the config.pbtxt of the engine's model.

        Raises:
            SettingsError: there are too few.
        """
        slots = self.max_conversations + self.max_queue + self.max_running + SPARE_SLOTS
        if slots > kept:
            raise SettingsError(
                f"settings max_conversations={self.max_conversations}, max_queue={self.max_queue} and "
                f"max_running={self.max_running} with {SPARE_SLOTS} to spare need {slots} sequences, but Triton keeps "
                f"{kept}; lower them, or raise max_candidate_sequences in the model's config.pbtxt"
            )


def _written(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
