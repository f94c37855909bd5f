"""The engine: requests in, steps, deltas out. Used by one thread at a time (see loop.py)."""

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from kvloom.errors import Internal, InvalidArgument, RequestError, Unavailable
from kvloom.kv.blocks import BlockPool
from kvloom.request import Delta, FinishReason, Request, Sequence, Sink
from kvloom.runner import Runner
from kvloom.scheduler import Scheduler
from kvloom.text import TextStream
from kvloom.tokenizer import Tokenizer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Limits:
    """What the engine takes.

    Attributes:
        context_length: longest sequence, prompt and answer, in tokens.
        max_queue: most requests waiting.
        fail_after_tokens: requests whose id begins with ``test-fail`` fail after so many tokens; 0 is off.
    """

    context_length: int
    max_queue: int
    fail_after_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at one moment; counters count since its start."""

    running: int = 0
    waiting: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Answer:
    text: TextStream
    sink: Sink


class Engine:
    """Submit, step, commit.

    Every request that ``submit`` took ends in exactly one final delta, and ends in one place, ``_end``.
    """

    def __init__(self, runner: Runner, scheduler: Scheduler, pool: BlockPool, tokenizer: Tokenizer, limits: Limits):
        self._runner = runner
        self._scheduler = scheduler
        self._pool = pool
        self._tokenizer = tokenizer
        self._limits = limits
        self._answers: dict[Sequence, _Answer] = {}
        self._tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()

    def check(self, request: Request) -> None:
        """Refuse what can never be served. Reads nothing that changes, so any thread may ask.

        Raises:
            InvalidArgument: the prompt does not fit the context or the pool.
        """
        count, context = len(request.prompt_ids), self._limits.context_length
        if count == 0:
            raise InvalidArgument("prompt", "is empty; send at least one token")
        if count > context - 1:
            raise InvalidArgument("prompt", f"has {count} tokens; context_length {context} takes at most {context - 1}")
        capacity = self._pool.total * self._pool.block_size
        if count > capacity:
            raise InvalidArgument("prompt", f"has {count} tokens; the whole KV cache holds {capacity}")

    def submit(self, sequence: Sequence, sink: Sink) -> None:
        """Queue a sequence whose request passed ``check``; its deltas go to ``sink``."""
        if len(self._scheduler.waiting) >= self._limits.max_queue:
            self._finished["error"] += 1
            sink(Delta("", (), error=Unavailable(f"queue full: {self._limits.max_queue} requests are waiting")))
            return
        params = sequence.request.params
        text = TextStream(self._tokenizer, params.stop, params.include_stop_str_in_output)
        self._answers[sequence] = _Answer(text, sink)
        self._scheduler.add(sequence)

    def cancel(self, sequence: Sequence) -> None:
        """End a sequence's answer now; nothing happens when it has ended already."""
        if sequence in self._answers:
            self._end(sequence, reason=FinishReason.CANCELLED)

    def fail_all(self, error: RequestError) -> None:
        """End every answer with ``error``."""
        for sequence in list(self._answers):
            self._end(sequence, error=error)

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._answers)

    def step(self) -> None:
        """Plan, compute and commit one step. A fault ends the requests it touches, never the engine."""
        plan = self._scheduler.plan()
        if plan.outgrown is not None:
            self._end(plan.outgrown, reason=FinishReason.LENGTH)
        if not plan.slices:
            return
        try:
            tokens = self._runner.run(plan.slices)
        except Exception as error:  # noqa: BLE001 the boundary that keeps one step's fault from ending the server
            log.exception("a step of %d sequences failed", len(plan.slices))
            for piece in plan.slices:
                self._end(piece.sequence, error=Internal(f"the step failed: {error}"))
            return
        sampled = iter(tokens)
        for piece in plan.slices:
            piece.sequence.computed = piece.start + piece.count
            if piece.samples:
                self._commit(piece.sequence, next(sampled))

    def stats(self) -> Stats:
        """A snapshot for metrics."""
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting),
            blocks_free=self._pool.free,
            blocks_used=self._pool.used,
            preemptions=self._scheduler.preemptions,
            prompt_tokens=self._tokens["prompt"],
            generated_tokens=self._tokens["generated"],
            finished=dict(self._finished),
        )

    def _commit(self, sequence: Sequence, token: int) -> None:
        """Append a sampled token, and end the answer where it ends."""
        request, text = sequence.request, self._answers[sequence].text
        fail_after = self._limits.fail_after_tokens
        if fail_after and sequence.generated == fail_after and request.id.startswith("test-fail"):
            self._end(sequence, error=Internal(f"test_fail_after_tokens={fail_after}"))
            return
        sequence.tokens.append(token)
        self._tokens["generated"] += 1
        if sequence.generated == 1:
            self._tokens["prompt"] += len(request.prompt_ids)
        at_end = token in self._tokenizer.eos_ids and not request.params.ignore_eos
        try:
            delta = "" if at_end else text.push(token)
        except Exception as error:  # noqa: BLE001 one answer's text must not end its neighbours
            log.exception("the text of request %s failed", request.id)
            self._end(sequence, error=Internal(f"the text of token {token} failed: {error}"))
            return
        if at_end or text.stopped:
            self._end(sequence, delta, (token,), FinishReason.STOP)
        elif sequence.generated >= request.params.max_tokens or len(sequence.tokens) >= self._limits.context_length:
            self._end(sequence, delta, (token,), FinishReason.LENGTH)
        else:
            self._answers[sequence].sink(Delta(delta, (token,)))

    def _end(
        self,
        sequence: Sequence,
        text: str = "",
        token_ids: tuple[int, ...] = (),
        reason: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Free what the sequence holds and send its final delta; text that was held back comes out first."""
        self._scheduler.remove(sequence)
        answer = self._answers.pop(sequence)
        if error is None:
            text += answer.text.flush()
            if answer.text.stopped and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP
        self._finished[reason or "error"] += 1
        answer.sink(Delta(text, token_ids, reason, error))
