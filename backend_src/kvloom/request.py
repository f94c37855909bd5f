"""The types that all departments share: requests, sequences and steps. No tensors."""

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationInfo, field_validator

from kvloom.errors import RequestError

TokenId = Annotated[int, Field(ge=0)]

MAX_TEXTS, MAX_CHARACTERS = 512, 16_384
"""The most strings in each of ``stop`` and ``bad_words``, and the most characters of all strings in one of them."""

MAX_STOP_IDS, MAX_BIASES = 1024, 4096
"""The most ``stop_token_ids`` and the most entries of ``logit_bias``.

A request with all of these delays other requests by about the time of one small step.
"""


def _bounded(texts: tuple[str, ...]) -> tuple[str, ...]:
    if len(texts) > MAX_TEXTS:
        raise ValueError(f"at most {MAX_TEXTS} strings, not {len(texts)}")
    characters = sum(map(len, texts))
    if characters > MAX_CHARACTERS:
        raise ValueError(f"at most {MAX_CHARACTERS} characters together, not {characters}")
    return texts


Texts = Annotated[tuple[str, ...], AfterValidator(_bounded)]
"""A string or a list of strings. Empty strings are dropped."""


class SamplingParams(BaseModel):
    """How tokens are chosen and when an answer ends. Keys, defaults and ranges are those of the sampling JSON.

    The docstring of a field is its line in the README, in Markdown.

    They apply in this order: logit_bias, penalties (repetition over prompt and answer, presence and frequency over the
    answer only), bans (bad_words, end tokens before min_tokens), temperature, min_p, top_k, top_p.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """at least 1; the context length bounds it"""
    min_tokens: Annotated[int, Field(ge=0)] = 0
    """at most max_tokens; end tokens are banned and stop strings ignored before"""
    temperature: Annotated[float, Field(ge=0, le=100)] = 1.0
    """0 (greedy) to 100"""
    top_p: Annotated[float, Field(ge=0, le=1)] = 1.0
    """0 to 1; 0 and 1 are off"""
    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1)] = -1
    """-1 and 0 are off"""
    min_p: Annotated[float, Field(ge=0, le=1)] = 0.0
    """0 to 1"""
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] = 1.0
    """above 0, to 10; over prompt and answer"""
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """-2 to 2; over the answer"""
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] = 0.0
    """-2 to 2; over the answer"""
    length_penalty: Annotated[float, Field(ge=1, le=1)] = 1.0
    """1 only"""
    seed: Annotated[int, Field(ge=0, le=2**64 - 1)] | None = None
    """0 to 2^64 - 1; random if not set. The same seed gives the same tokens, whatever else runs"""
    stop: Texts = ()
    """a string or a list; the first one found in the text ends the answer and is cut off; empty ones are ignored"""
    stop_token_ids: Annotated[tuple[TokenId, ...], Field(max_length=MAX_STOP_IDS)] = ()
    """a list; these end the answer like the model's own end tokens"""
    bad_words: Texts = ()
    """a string or a list that the answer must not contain; empty ones are ignored"""
    include_stop_str_in_output: bool = False
    """keep the stop string"""
    ignore_eos: bool = False
    """continue after the model's end token"""
    logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    """0 to 20 alternatives per token in the output `logprobs`"""
    logit_bias: Annotated[dict[TokenId, Annotated[float, Field(ge=-100, le=100)]], Field(max_length=MAX_BIASES)] = {}
    """`{"token id": -100 to 100}`"""
    skip_special_tokens: bool = True
    """leave special tokens out of the text"""
    n: Annotated[int, Field(ge=1, le=1)] = 1
    """1 only"""
    beam_width: Annotated[int, Field(ge=1, le=1)] = 1
    """1 only"""

    @field_validator("min_tokens")
    @classmethod
    def _at_most_max_tokens(cls, value: int, info: ValidationInfo) -> int:
        if value > info.data.get("max_tokens", value):
            raise ValueError("must be at most max_tokens")
        return value

    @field_validator("stop", "bad_words", mode="before")
    @classmethod
    def _one_or_many(cls, value: object) -> object:
        texts = (value,) if isinstance(value, str) else () if value is None else value
        # JSON has no tuples; strict mode would refuse its lists
        return tuple(text for text in texts if text != "") if isinstance(texts, (list, tuple)) else texts


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """One answer to produce.

    Attributes:
        id: the client's request id, or a generated one. It is for messages and tests, not for lookup.
        prompt_ids: token ids of the prompt, at least one.
        params: how to sample and when to stop.
        arrival: when the request was received (``time.monotonic()``, seconds).
        logprobs: how many alternatives per token to return, beside the token's own log probability; None for no log
            probabilities.
        deadline: when the answer ends with the tokens so far (``time.monotonic()``); None for no deadline.
        priority: higher runs first.
        cache_salt: only requests with the same salt share prefixes.
        retain_s: how many seconds to retain the prompt's blocks after the answer; negative: for ever.
    """

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    arrival: float
    logprobs: int | None = None
    deadline: float | None = None
    priority: int = 0
    cache_salt: str = ""
    retain_s: float = 0.0


class FinishReason(StrEnum):
    """Why an answer ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    DEADLINE = "deadline"


@dataclass(frozen=True, slots=True)
class Sampled:
    """A token that was chosen.

    Attributes:
        id: the token.
        logprob: its natural log probability under the raw logits; None if not requested.
        top: the most likely tokens and their log probabilities, best first, as many as requested.
    """

    id: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """The resources that an answer used. Times are in milliseconds.

    Attributes:
        prompt_tokens: tokens of the prompt.
        cached_tokens: prompt tokens that were found in the prefix cache.
        generated_tokens: tokens of the answer.
        queue_ms: time from arrival to the request's first step.
        prefill_ms: time from the first step to the first token.
        decode_ms: time from the first token to the end.
        blocks: the number of blocks at the end.
        kv_dtype: the cache's dtype.
        kv_policy: the cache's policy.
        evicted_blocks: blocks that the policy dropped.
        preemptions: how often the request was preempted.
        rerendered_tokens: tokens of earlier turns that were computed again, because the chat template renders them
            differently in the longer conversation.
    """

    prompt_tokens: int
    cached_tokens: int = 0
    generated_tokens: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float
    blocks: int
    kv_dtype: str
    kv_policy: str = "full"
    evicted_blocks: int = 0
    preemptions: int
    rerendered_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """The part that one step adds to an answer.

    Attributes:
        text: new text. It may be empty while a character or a possible stop string is incomplete.
        tokens: tokens generated since the previous delta, including end and stop tokens.
        finish_reason: set on the last delta only.
        error: set instead of a finish reason if the request failed. This delta is the last one.
        usage: set together with a finish reason.
    """

    text: str
    tokens: tuple[Sampled, ...]
    finish_reason: FinishReason | None = None
    error: RequestError | None = None
    usage: Usage | None = None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The ids of ``tokens``."""
        return tuple(token.id for token in self.tokens)

    @property
    def final(self) -> bool:
        """Whether this is the last delta."""
        return self.finish_reason is not None or self.error is not None


Sink = Callable[[Delta], None]
"""Takes an answer's deltas in order. The engine thread calls it, so it must not block."""


Banned = Mapping[int, Mapping[tuple[int, ...], tuple[int, ...]]]
"""Forbidden next tokens, by length and ids of the tokens at the answer's end. Length 0: always forbidden."""


@dataclass(eq=False, slots=True, kw_only=True)
class KvState:
    """The computed keys and values of some tokens: in device blocks, in host blocks, or dropped.

    Attributes:
        computed: how many leading tokens have their keys and values in ``blocks``.
        blocks: the block table. Block i holds tokens [i * block_size, (i + 1) * block_size).
        hashed: how many leading blocks are in the prefix cache.
        host_blocks: the host blocks, while the state is swapped out.
        swapped: how many leading tokens have their keys and values in ``host_blocks``.
    """

    computed: int = 0
    blocks: list[int] = field(default_factory=list)
    hashed: int = 0
    host_blocks: list[int] = field(default_factory=list)
    swapped: int = 0

    def move_to(self, other: "KvState") -> None:
        """Move everything to ``other``, which must be empty."""
        assert not (other.blocks or other.host_blocks)
        other.computed, other.hashed, other.swapped = self.computed, self.hashed, self.swapped
        other.blocks, other.host_blocks = self.blocks, self.host_blocks
        self.computed = self.hashed = self.swapped = 0
        self.blocks, self.host_blocks = [], []


@dataclass(eq=False, slots=True)
class Sequence(KvState):
    """The state of a request in the engine: its tokens and their KV state.

    Attributes:
        request: the request.
        tokens: prompt and generated token ids.
        seed: the request's seed, or a random one. Every random number depends on the seed and the position only.
        cached: how many of the prompt's tokens were found in the prefix cache.
        preemptions: how often the sequence was preempted.
        rerendered: see ``Usage.rerendered_tokens``.
        rank: its rank in the schedule. The lowest comes first.
        end_ids: tokens that end the answer. They are banned before min_tokens.
        banned: the tokens that ``bad_words`` forbids.
        changes: the sampler's private state, see ``ScoreChanges``.
    """

    request: Request
    tokens: list[int] = field(init=False)
    seed: int = field(init=False)
    cached: int = 0
    preemptions: int = 0
    rerendered: int = 0
    rank: tuple[float, int] = (0.0, 0)
    end_ids: frozenset[int] = frozenset()
    banned: Banned = field(default_factory=dict)
    changes: object = None

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt_ids)
        asked = self.request.params.seed
        self.seed = secrets.randbits(64) if asked is None else asked

    @property
    def namespace(self) -> str:
        """The sequence's namespace in the prefix cache. Only sequences of the same namespace share blocks."""
        return self.request.cache_salt

    @property
    def generated(self) -> int:
        """Number of tokens generated so far."""
        return len(self.tokens) - len(self.request.prompt_ids)

    @property
    def pending(self) -> int:
        """Number of known tokens that are not computed yet. It is at least one."""
        return len(self.tokens) - self.computed


@dataclass(frozen=True, slots=True)
class Slice:
    """The tokens [start, start + count) of a sequence, which a step computes."""

    sequence: Sequence
    start: int
    count: int

    @property
    def samples(self) -> bool:
        """Whether the slice ends at the last known token, so that the next token is sampled."""
        return self.start + self.count == len(self.sequence.tokens)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step.

    Attributes:
        slices: the tokens to compute.
        swap_out: pairs (device block, host block) to copy first, before anything else is written.
        swap_in: pairs (host block, device block) to copy after that.
    """

    slices: list[Slice] = field(default_factory=list)
    swap_out: list[tuple[int, int]] = field(default_factory=list)
    swap_in: list[tuple[int, int]] = field(default_factory=list)
