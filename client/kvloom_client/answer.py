"""Answers and their chunks, for all protocols."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvloom_client.errors import IncompleteAnswer, ServerError


@dataclass(frozen=True, slots=True)
class Chunk:
    """The part that one response adds to an answer.

    Attributes:
        text: new text since the previous chunk; may be empty.
        token_ids: tokens generated since the previous chunk, including end and stop tokens.
        finish_reason: why the answer ended (``stop``, ``length``, ...); None before the last chunk.
        num_input_tokens: number of tokens of the prompt.
        logprobs: one entry per token: ``id``, ``text``, ``logprob`` and ``top``; None unless requested.
        cumulative_logprob: sum of the log probabilities of all tokens so far; None unless requested.
        usage: the resources that the answer used (tokens, times in milliseconds, blocks), on the last chunk; None
            unless requested.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None
    num_input_tokens: int
    logprobs: list[dict[str, Any]] | None = None
    cumulative_logprob: float | None = None
    usage: dict[str, Any] | None = None

    @property
    def num_output_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class Answer(Chunk):
    """A whole answer: its chunks joined, without the prompt.

    Attributes:
        finish_reason: why it ended: ``stop``, ``length``, ``cancelled`` or ``deadline``.
    """

    finish_reason: str


@dataclass(frozen=True, slots=True)
class Reply:
    """One message of a stream. The last one has ``final`` set and may have no chunk."""

    chunk: Chunk | None
    final: bool


def chunk_of(outputs: Mapping[str, Any]) -> Chunk:
    """The chunk of a response. ``outputs`` maps names to a value or a list of values; missing ones were not requested.

    Raises:
        ValueError: an output is malformed.
    """
    logprobs, usage = _first(outputs, "logprobs"), _first(outputs, "usage")
    return Chunk(
        text=_first(outputs, "text_output") or "",
        token_ids=tuple(_many(outputs, "token_ids")),
        finish_reason=_first(outputs, "finish_reason") or None,
        num_input_tokens=_first(outputs, "num_input_tokens") or 0,
        logprobs=json.loads(logprobs) if logprobs else None,
        cumulative_logprob=_first(outputs, "cumulative_logprob"),
        usage=json.loads(usage) if usage else None,
    )


def join(chunks: Sequence[Chunk]) -> Answer:
    """Join all chunks of a finished stream to an answer.

    Raises:
        IncompleteAnswer: the last chunk has no finish reason.
    """
    last = chunks[-1] if chunks else None
    if last is None or last.finish_reason is None:
        raise IncompleteAnswer("the last response has no finish reason")
    logprobs = [chunk.logprobs for chunk in chunks if chunk.logprobs is not None]
    return Answer(
        text="".join(chunk.text for chunk in chunks),
        token_ids=tuple(token for chunk in chunks for token in chunk.token_ids),
        finish_reason=last.finish_reason,
        num_input_tokens=last.num_input_tokens,
        logprobs=[entry for part in logprobs for entry in part] if logprobs else None,
        cumulative_logprob=last.cumulative_logprob,
        usage=last.usage,
    )


def read_control(chunks: Sequence[Chunk]) -> dict[str, Any]:
    """Parse the reply to a control request from all chunks of its finished stream.

    Raises:
        ServerError: it is not a JSON object.
    """
    text = "".join(chunk.text for chunk in chunks)
    try:
        reply = json.loads(text)
    except ValueError as error:
        raise ServerError(f"the reply to a control request is not JSON: {text!r}") from error
    if not isinstance(reply, dict):
        raise ServerError(f"the reply to a control request is not a JSON object: {text!r}")
    return reply


def _many(outputs: Mapping[str, Any], name: str) -> list[Any]:
    # Triton's JSON has a bare value for a tensor with one element
    value = outputs.get(name, [])
    return value if isinstance(value, list) else [value]


def _first(outputs: Mapping[str, Any], name: str) -> Any:
    return next(iter(_many(outputs, name)), None)
