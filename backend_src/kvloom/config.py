"""The server's settings: one frozen object, read once from the `parameters` of llm's config.pbtxt."""

import os
import re
from collections.abc import Mapping
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from kvloom.errors import SettingsError

SPARE_SLOTS = 1200
"""Of Triton's sequences, kept for dropped conversations and control requests."""

TRITONS = re.compile("EXECUTION_ENV_PATH|FORCE_CPU_ONLY_INPUT_TENSORS|TRITON_[A-Z_]+")
"""Parameters in config.pbtxt that are Triton's or its Python backend's own."""

NonNegative = Annotated[int, Field(ge=0)]
Positive = Annotated[int, Field(ge=1)]


class Settings(BaseModel):
    """What an operator can set; values arrive as the strings of config.pbtxt.

    Attributes:
        model: ``default`` (SmolLM2-135M-Instruct, fetched once), a Hugging Face folder or a GGUF file.
        device: where the model runs: ``cpu``, ``cuda:0`` (or another number); ``auto`` is ``cuda:0`` where torch sees a
            GPU, else ``cpu``.
        weights: what the weights are; ``auto`` is bf16 on a GPU and where the CPU has bf16 instructions, else fp32.
            ``fp32`` makes activations and cache fp32 too. ``int8`` rounds weights to groups of 8 bits; ``int4`` takes a
            GGUF file's groups of 4 bits as they are; ``w8a8`` rounds weights and activations to INT8, on a CPU.
        kv_dtype: dtype of the cache; ``auto`` follows the activations.
        kv_memory: size of the block pool: bytes with a unit ("512MiB"), a share of the free memory ("60%") or ``auto``,
            which is what weights, a step and swap_memory leave of it.
        kv_blocks: number of blocks in the pool; overrides kv_memory; 0 is off.
        swap_memory: host memory for sequences that are swapped out, like "512MiB"; 0 is off.
        retain_memory: most of the block pool that prompts may keep for themselves, like "512MiB"; 0 is off.
        block_size: tokens per block, a power of two.
        context_length: longest sequence in tokens; 0 takes the model's own.
        max_batch_tokens: a step's token budget.
        max_running: most sequences in one step; never more than max_batch_tokens, of which each takes one.
        max_queue: most requests waiting, beside those that may run at once; more are refused at once.
        queue_timeout_ms: longest wait for admission, in milliseconds; 0 is off.
        max_conversations: most conversations; beyond it the least recently used idle one is dropped.
        conversation_idle_s: seconds after which an idle conversation is dropped; 0 is off.
        journal_dir: folder for the tokens and messages of conversations, which survive a restart there; empty: they do
            not. `kvloom serve` sets it.
        prefix_cache: let requests that begin with the same tokens share their blocks.
        threads: CPU threads of a step; 0 takes every core that the process may run on.
        stuck_after_s: `kvloom serve` starts tritonserver again when no step has finished for so long; 0 is off.
        admin_token: what the control op ``drain`` asks for, itself or as ``sha256:`` and its digest, several separated
            by commas. Triton shows the settings to every client, so `kvloom serve` hands over digests only.
        test_fail_after_tokens: tests only: requests whose id begins with ``test-fail`` fail after so many tokens.
        test_block_hash: tests only: a weak hash for the prefix cache.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    model: str = "default"
    device: str = "auto"
    weights: Literal["auto", "fp32", "bf16", "int8", "int4", "w8a8"] = "auto"
    kv_dtype: Literal["auto", "fp32", "bf16"] = "auto"
    kv_memory: str = "auto"
    kv_blocks: NonNegative = 0
    swap_memory: str = "512MiB"
    retain_memory: str = "0"
    block_size: Positive = 32
    context_length: NonNegative = 0
    max_batch_tokens: Positive = 512
    max_running: Positive = 64
    max_queue: Positive = 1024
    queue_timeout_ms: NonNegative = 0
    max_conversations: Positive = 1024
    conversation_idle_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 3600
    journal_dir: str = ""
    prefix_cache: bool = True
    threads: NonNegative = 0
    stuck_after_s: NonNegative = 30
    admin_token: str = ""
    test_fail_after_tokens: NonNegative = 0
    test_block_hash: Literal["", "constant", "mod7"] = ""

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
        """``threads``, or one for each core that this process may run on; a container may leave it few of them."""
        return self.threads or len(os.sched_getaffinity(0))

    @classmethod
    def names(cls) -> list[str]:
        """The settings that there are for operators."""
        return [name for name in cls.model_fields if not name.startswith("test_")]

    @classmethod
    def parse(cls, parameters: Mapping[str, str]) -> "Settings":
        """Read settings from strings; parameters that are for Triton itself are none.

        Raises:
            SettingsError: naming the setting and what it takes.
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
            raise SettingsError("setting kv_dtype='bf16': weights=fp32 makes the cache fp32 too")
        if settings.retain_memory != "0" and not settings.prefix_cache:
            raise SettingsError(f"setting retain_memory={settings.retain_memory!r}: retaining needs prefix_cache")
        return settings

    def check_slots(self, kept: int) -> None:
        """See to it that Triton lets in whatever the engine may take.

        Args:
            kept: sequences that Triton keeps of the engine's model: ``max_candidate_sequences`` in its config.pbtxt.

        Raises:
            SettingsError: those are too few.
        """
        slots = self.max_conversations + self.max_queue + self.max_running + SPARE_SLOTS
        if slots > kept:
            raise SettingsError(
                f"settings max_conversations={self.max_conversations}, max_queue={self.max_queue} and "
                f"max_running={self.max_running} with {SPARE_SLOTS} to spare are {slots}; Triton keeps "
                f"{kept} sequences (max_candidate_sequences in the model's config.pbtxt)"
            )
