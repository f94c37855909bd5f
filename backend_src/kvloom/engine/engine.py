"""The engine: it takes requests, runs steps and sends deltas. Only one thread may use it at a time, see thread.py."""

import logging
import time
from collections import Counter
from collections.abc import Collection, Iterator

from kvloom.conversation.journal import Journal
from kvloom.conversation.manager import ConversationManager, NoTriton, Triton
from kvloom.conversation.registry import ConversationRegistry, Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.engine.answer import AnswerBuilder
from kvloom.engine.deliveries import Deliveries
from kvloom.engine.observations import Observations
from kvloom.engine.stats import Stats
from kvloom.errors import Internal, RequestError, Unavailable, as_request_error
from kvloom.executor.runner import Runner
from kvloom.faults import logged
from kvloom.kv.blocks import BlockPool
from kvloom.kv.cache import BlockCache
from kvloom.request import Delta, FinishReason, KvState, Sampled, Sequence, Sink, StepPlan
from kvloom.scheduling.admission import Admission, EngineLimits
from kvloom.scheduling.scheduler import Scheduler
from kvloom.scheduling.timers import Timers
from kvloom.text.bad_words import banned_tokens
from kvloom.text.tokenizer import Tokenizer

log = logging.getLogger(__name__)

_NO_END = Internal("the answer could not be ended")
"""The client's error if ending its answer failed."""


class Engine:
    """Plans, runs and commits steps. Requests come as turns of conversations, see ``turns``.

    Every request that has begun ends with exactly one final delta, in ``_end``.

    Args:
        triton: is told of conversations; None without Triton.
        journal: saves conversations for a restart; None to save nothing.

    Attributes:
        observations: measured values, for histograms.
        steps: how many steps have finished.
        failed_steps: how many have failed since the last one that finished.
        draining: whether new requests are refused.
        turns: schedules the turns of all conversations.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        cache: BlockCache,
        host: BlockPool,
        tokenizer: Tokenizer,
        limits: EngineLimits,
        triton: Triton | None = None,
        journal: Journal | None = None,
    ):
        self.observations = Observations()
        self.steps = 0
        self.failed_steps = 0
        self.draining = False
        self._runner = runner
        self._scheduler = scheduler
        self._cache = cache
        self._host = host
        self._tokenizer = tokenizer
        self._limits = limits
        # The last token of a sequence needs no room in the cache: its keys and values are never computed
        self._longest = min(limits.context_length, cache.total * cache.block_size + 1)
        self._answers: dict[Sequence, AnswerBuilder] = {}
        self._deliveries = Deliveries()
        self._timers = Timers()
        self._tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._admission = Admission(limits, cache, scheduler)
        registry = ConversationRegistry(limits.max_conversations, limits.conversation_idle_s)
        manager = ConversationManager(scheduler, registry, triton or NoTriton(), journal, self._deliveries.post)
        self.turns = TurnScheduler(self, scheduler, tokenizer, limits.context_length, manager)
        manager.restore()

    def prepare(self, turn: Turn) -> None:
        """Check and prepare a turn before it is queued. Any thread may call this.

        Raises:
            InvalidArgument: the turn can never be served.
        """
        sequence = turn.sequence
        if turn.start:
            self._admission.check(sequence.request)
        elif turn.messages is None:
            self._admission.check_prompt(sequence.request.prompt_ids)
        sequence.banned = banned_tokens(self._tokenizer, sequence.request.params.bad_words)

    def check_prompt(self, ids: Collection[int]) -> None:
        """See ``Admission.check_prompt``."""
        self._admission.check_prompt(ids)

    def refusal(self, turn: Turn) -> Unavailable | None:
        """The error for a turn that can't be served at the moment; None if it can."""
        if self.draining:
            return Unavailable("the server is shutting down and takes no new requests")
        full = self._admission.queue_refusal(also_waiting=self.turns.queued)
        return self._admission.retain_refusal(turn.sequence) if full is None and turn.start else full

    def begin(self, sequence: Sequence, sink: Sink, held: KvState, since: float) -> None:
        """Queue a sequence without asking ``refusal``. If this raises, the sequence has not begun.

        Args:
            sequence: the sequence, prepared.
            sink: receives its deltas.
            held: the KV state of its first tokens.
            since: when it began to wait for a step (``time.monotonic()``).
        """
        answer = AnswerBuilder(sequence.request, self._tokenizer, self._longest, sink, self.observations)
        sequence.end_ids = answer.end_ids
        if self._limits.queue_timeout_s:
            self._timers.add(since + self._limits.queue_timeout_s, "queue", sequence)
        self._scheduler.add(sequence, held)
        self._answers[sequence] = answer

    def await_deadline(self, sequence: Sequence) -> None:
        """Set a timer that ends the answer at its deadline."""
        if sequence.request.deadline is not None:
            self._timers.add(sequence.request.deadline, "deadline", sequence)

    def answer_unbegun(
        self, sequence: Sequence, sink: Sink, reason: FinishReason | None = None, error: RequestError | None = None
    ) -> None:
        """Send the final delta of a sequence that has not begun, with a finish reason or an error."""
        self._timers.forget(sequence)
        final = Delta("", (), error=error or _NO_END)
        with logged(log, "could not end request %s", sequence.request.id):
            answer = AnswerBuilder(sequence.request, self._tokenizer, self._longest, sink, self.observations)
            usage = answer.end(sequence, self._limits.kv_dtype)
            if error is None:
                final = Delta("", (), reason, usage=usage)
        self._send_final(sink, final)

    def cancel(self, sequence: Sequence, error: RequestError | None = None) -> None:
        """End a sequence's answer as cancelled, or with ``error``. Does nothing if it has already ended."""
        if sequence in self._answers:
            self.end(sequence, None if error else FinishReason.CANCELLED, error)
        else:
            self.turns.cancel(sequence)

    def end(self, sequence: Sequence, reason: FinishReason | None = None, error: RequestError | None = None) -> None:
        """End an answer that has begun."""
        self._end(sequence, reason=reason, error=error)

    def fail_all(self, error: RequestError) -> None:
        """End every answer with ``error``."""
        self.turns.fail_queued(error)
        for sequence in list(self._answers):
            with logged(log, "could not end request %s", sequence.request.id):
                self._end(sequence, error=error)

    def recover(self, error: RequestError) -> None:
        """Recover from a fault outside of a step: end every answer and drop the prefix cache.

        A plan that was not executed may have hashed blocks that were never computed, and relied on copies.
        """
        self.failed_steps += 1
        self.fail_all(error)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            # These are left because ending them failed
            with logged(log, "could not remove request %s from the scheduler", sequence.request.id):
                self._scheduler.remove(sequence)
        self.turns.recover()
        self._cache.flush()

    @property
    def busy(self) -> bool:
        """Whether there is something for a step to compute."""
        return bool(self._answers)

    @property
    def idle(self) -> bool:
        """Whether no request runs or waits."""
        return not self._answers and not self.turns.queued

    @property
    def wakes_at(self) -> float:
        """When ``tick`` has something to do next (``time.monotonic()``, or infinite)."""
        return min(self.turns.manager.registry.next_expiry, self._timers.next)

    def tick(self) -> None:
        """End overdue answers and drop expired conversations."""
        now = time.monotonic()
        self._end_overdue(now)
        self.turns.manager.expire(now)

    def step(self) -> None:
        """Plan, compute and commit one step. A fault ends the affected requests but not the engine.

        If the runner overlaps, a step's deltas are delivered while the GPU computes the next step. The host waits then
        anyway, so the sender threads get time. Everything that affects the next step is done before it is planned.
        """
        try:
            self._step()
        finally:
            self._deliveries.held = False
            if not self.busy:
                self._deliveries.deliver()

    def _step(self) -> None:
        began = time.monotonic()
        self._end_overdue(began)
        plan = self._scheduler.plan()
        for piece in plan.slices:
            self._answers[piece.sequence].start(began)
        try:
            self._runner.move(plan)
            if not plan.slices:
                self._deliveries.deliver()
                return
            run, overlaps = self._runner.run, self._runner.overlaps
            outcomes = iter(run(plan.slices, self._deliveries.deliver) if overlaps else run(plan.slices))
        except Exception as error:  # noqa: BLE001 one step's fault must not end the server
            log.exception("a step of %d sequences failed", len(plan.slices))
            self.failed_steps += 1
            self._scheduler.abandon(plan)
            for piece in plan.slices:
                self._end(piece.sequence, error=Internal(f"the step failed: {error}"))
            return
        now = time.monotonic()
        self._deliveries.held = overlaps
        for piece in plan.slices:
            piece.sequence.computed = piece.start + piece.count
            if piece.samples:
                self._commit(piece.sequence, next(outcomes), now)
        self._observe(plan, now - began)

    def flush(self) -> int:
        """Drop the prefix cache. Returns how many blocks it had."""
        return self._cache.flush()

    def check_invariants(self) -> None:
        """Assert the invariants of blocks, sequences and conversations. O(blocks)."""
        for _ in self.check_in_parts():
            pass

    def check_in_parts(self) -> Iterator[None]:
        """Like ``check_invariants``, but yields between parts. If the engine works in a pause, the check is void."""
        yield from self._scheduler.check_in_parts()
        waiting, running = self._scheduler.waiting, self._scheduler.running
        assert len(waiting) + len(running) == len(self._answers), "a sequence has no answer, or the reverse"
        self.turns.check()

    def stats(self) -> Stats:
        """A snapshot for metrics."""
        return Stats(
            running=len(self._scheduler.running),
            waiting=len(self._scheduler.waiting) + self.turns.queued,
            conversations=len(self.turns.manager.registry),
            blocks_free=self._cache.free,
            blocks_used=self._cache.used,
            blocks_cached=self._cache.cached,
            blocks_swapped=self._host.used,
            swaps=self._scheduler.swaps,
            recomputes=self._scheduler.recomputes,
            prefix_queried=self._scheduler.prefix_queried,
            prefix_hit=self._scheduler.prefix_hit,
            prompt_tokens=self._tokens["prompt"],
            generated_tokens=self._tokens["generated"],
            finished=dict(self._finished),
        )

    def _end_overdue(self, now: float) -> None:
        """End requests that have passed their deadline, and requests that have waited too long for their first step."""
        for kind, sequence in self._timers.due(now):
            if sequence not in self._answers:
                self.turns.overdue(sequence)
            elif kind == "deadline":
                self._end(sequence, reason=FinishReason.DEADLINE)
            elif sequence in self._scheduler.waiting and not sequence.preemptions:
                limit = self._limits.queue_timeout_s
                self._end(sequence, error=Unavailable(f"queue_timeout_ms: not begun within {limit * 1e3:.0f} ms"))

    def _observe(self, plan: StepPlan, took: float) -> None:
        self.steps += 1
        self.failed_steps = 0
        self.observations.add("step_seconds", took)
        self.observations.add("step_tokens", sum(piece.count for piece in plan.slices))
        self.observations.add("step_sequences", len(plan.slices))

    def _commit(self, sequence: Sequence, outcome: Sampled | Exception, now: float) -> None:
        """Append a sampled token, then send a delta or end the answer."""
        request, answer = sequence.request, self._answers[sequence]
        fail_after = self._limits.fail_after_tokens
        if fail_after and sequence.generated == fail_after and request.id.startswith("test-fail"):
            outcome = Internal(f"test_fail_after_tokens={fail_after}")
        try:
            if isinstance(outcome, Exception):
                raise outcome
            text, reason = answer.take(sequence, outcome, now)
        except Exception as error:  # noqa: BLE001 one answer's fault must not end the others
            log.exception("request %s failed", request.id)
            self._end(sequence, error=as_request_error(error))
            return
        self._tokens["generated"] += 1
        if sequence.generated == 1:
            self._tokens["prompt"] += len(request.prompt_ids)
        if reason is None:
            self._deliveries.send(answer.sink, Delta(text, (outcome,)))
        else:
            self._end(sequence, text, (outcome,), reason)

    def _end(
        self,
        sequence: Sequence,
        text: str = "",
        tokens: tuple[Sampled, ...] = (),
        reason: FinishReason | None = None,
        error: RequestError | None = None,
    ) -> None:
        """Free or park the sequence's blocks and send its final delta, with the text that was held back."""
        answer = self._answers.pop(sequence)
        self._timers.forget(sequence)
        final = Delta("", (), error=error or _NO_END)
        with logged(log, "could not end request %s", sequence.request.id):
            usage = answer.end(sequence, self._limits.kv_dtype)
            if error is None:
                text += answer.text.flush()
                if answer.text.stopped and reason is FinishReason.LENGTH:
                    reason = FinishReason.STOP
                final = Delta(text, tokens, reason, usage=usage)
        try:
            conversation = self.turns.settle(sequence, final.error)
        except Exception:
            # Blocks may be lost, which the caller handles. The client must get its final delta anyway
            self._send_final(answer.sink, Delta("", (), error=_NO_END))
            raise
        self._send_final(answer.sink, final)
        if conversation is not None:
            self.turns.proceed(conversation)

    def _send_final(self, sink: Sink, final: Delta) -> None:
        self._finished["error" if final.error is not None else str(final.finish_reason)] += 1
        self._deliveries.send(sink, final)
