"""Builds one answer: takes sampled tokens, returns text and decides when the answer ends."""

import time

from kvloom.engine.observations import Observations
from kvloom.request import FinishReason, Request, Sampled, Sequence, Sink, Usage
from kvloom.text.stop_strings import TextStream
from kvloom.text.tokenizer import Tokenizer


class AnswerBuilder:
    """The state of a request that is not in its sequence.

    Args:
        request: the request.
        tokenizer: the model's tokenizer.
        longest: maximum number of tokens of a sequence, prompt and answer together.
        sink: receives the deltas.
        observations: receives the measured times.

    Attributes:
        sink: receives the deltas.
        text: streams the answer's text.
        end_ids: tokens that end the answer.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, longest: int, sink: Sink, observations: Observations):
        params = request.params
        self.sink = sink
        self.text = TextStream(
            tokenizer, params.stop, params.include_stop_str_in_output, skip_special_tokens=params.skip_special_tokens
        )
        self._params = params
        self._arrival = request.arrival
        self._longest = longest
        self.end_ids = frozenset(params.stop_token_ids)
        if not params.ignore_eos:
            self.end_ids |= tokenizer.eos_ids
        self._observations = observations
        self._started: float | None = None
        self._first_token: float | None = None
        self._last_token = 0.0

    def start(self, now: float) -> None:
        """Note that a step computes tokens of the request. Only the first call counts."""
        if self._started is None:
            self._started = now
            self._observations.add("queue_seconds", now - self._arrival)

    def take(self, sequence: Sequence, sampled: Sampled, now: float) -> tuple[str, FinishReason | None]:
        """Append a token to the sequence. Return the text to send and, if the answer ends, its finish reason.

        Like a stop string, the text of an end token is left out unless the request asks for it.
        """
        if self._first_token is None:
            self._first_token = now
            self._observations.add("ttft_seconds", now - self._arrival)
        else:
            self._observations.add("inter_token_seconds", now - self._last_token)
        self._last_token = now
        params = self._params
        sequence.tokens.append(sampled.id)
        # The sampler bans end tokens before min_tokens
        at_end = sampled.id in self.end_ids
        text = ""
        if not at_end or params.include_stop_str_in_output:
            text = self.text.push(sampled.id, may_stop=sequence.generated > params.min_tokens)
        if at_end or self.text.stopped:
            return text, FinishReason.STOP
        if sequence.generated >= params.max_tokens or len(sequence.tokens) >= self._longest:
            return text, FinishReason.LENGTH
        return text, None

    def end(self, sequence: Sequence, kv_dtype: str) -> Usage:
        """End the answer and return its usage. Call it once, while the sequence still has its blocks."""
        now = time.monotonic()
        self._observations.add("e2e_seconds", now - self._arrival)
        started = now if self._started is None else self._started
        first = now if self._first_token is None else self._first_token
        return Usage(
            prompt_tokens=len(sequence.request.prompt_ids),
            cached_tokens=sequence.cached,
            generated_tokens=sequence.generated,
            queue_ms=(started - self._arrival) * 1e3,
            prefill_ms=(first - started) * 1e3,
            decode_ms=(now - first) * 1e3,
            blocks=len(sequence.blocks),
            kv_dtype=kv_dtype,
            preemptions=sequence.preemptions,
            rerendered_tokens=sequence.rerendered,
        )
