"""The nouns everything shares: what a request, a sequence and a step are. No tensors here."""

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, field_validator

from kvloom.errors import RequestError

Seed = Annotated[int, Field(ge=0, le=2**64 - 1)]


class SamplingParams(BaseModel):
    """How tokens are chosen and when an answer ends. Keys, defaults and ranges are the sampling JSON's."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    max_tokens: Annotated[int, Field(ge=1)] = 256
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=-1)] = -1
    seed: Seed | None = None
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False

    @field_validator("stop", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        stops = (value,) if isinstance(value, str) else value
        # JSON has no tuples; strict mode would refuse its lists
        return tuple(stop for stop in stops if stop != "") if isinstance(stops, (list, tuple)) else stops


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to produce.

    Attributes:
        id: the client's request id, or one minted by the door; for messages and tests, not for look-up.
        prompt_ids: token ids of the prompt, at least one.
        params: how to sample and when to stop.
        arrival: ``time.monotonic()`` when it was received, seconds.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step adds to an answer.

    Attributes:
        text: text that is certain now (may be empty while a character or a possible stop string is incomplete).
        token_ids: tokens generated since the previous delta, end and stop tokens included.
        finish_reason: set on the last delta only.
        error: set instead of a finish reason when the request failed; the delta is then the last.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None

    @property
    def final(self) -> bool:
        """Whether nothing follows."""
        return self.finish_reason is not None or self.error is not None


Sink = Callable[[Delta], None]
"""Takes an answer's deltas in order; called by the loop thread, so it must not block."""


@dataclass(eq=False, slots=True)
class Sequence:
    """A request at work: the tokens it knows, how many of them have their KV computed, and where that lies.

    Attributes:
        request: what was asked.
        tokens: prompt and generated token ids.
        computed: how many leading tokens have their KV in ``blocks``.
        seed: the request's, or a random one: every draw is a function of seed and position.
        blocks: block table: the i-th block holds tokens [i * block_size, (i + 1) * block_size).
    """

    request: Request
    tokens: list[int] = field(init=False)
    seed: int = field(init=False)
    computed: int = 0
    blocks: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        asked = self.request.params.seed
        self.seed = secrets.randbits(64) if asked is None else asked

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Number of known tokens whose KV is not computed yet; at least one while the sequence lives."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Slice:
    """Tokens [start, start + count) of one sequence, to be computed in this step."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the slice reaches the last known token, so that a new one can be sampled."""
        return self.start + self.count == len(self.sequence.tokens)
