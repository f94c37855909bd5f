"""The engine: requests in, steps, deltas out. Used by one thread at a time (see thread.py)."""

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial

from kvloom.conversation.journal import Journal
from kvloom.conversation.manager import ConversationManager, NoTriton, Triton
from kvloom.conversation.registry import ConversationRegistry, Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.engine.answer import AnswerBuilder
from kvloom.engine.observations import Observations
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
"""What a client hears where its answer's end itself was a fault."""


@dataclass(frozen=True, slots=True)
class Stats:
    """The engine at one moment; counters count since its start."""

    running: int = 0
    waiting: int = 0
    conversations: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_swapped: int = 0
    swaps: int = 0
    recomputes: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)


class Engine:
    """Step and commit. Requests come as turns of conversations, see ``turns``.

    Every request that has begun ends in exactly one final delta, and ends in one place, ``_end``.

    Args:
        triton: hears which conversations there are; None: there is no Triton.
        journal: keeps conversations for an engine after this one; None: nobody does.

    Attributes:
        observations: measured values, for histograms.
        steps: how many steps have finished.
        failed_steps: how many have failed since the last one that finished.
        draining: no request is taken any more.
        turns: its conversations.
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
        # the last token of a sequence needs no room: its KV is never computed
        self._longest = min(limits.context_length, cache.total * cache.block_size + 1)
        self._answers: dict[Sequence, AnswerBuilder] = {}
        # what goes out, deltas to their sinks and all else, and whether it waits until the next step is being computed
        self._outbox: deque[Callable[[], None]] = deque()
        self._holds_back = False
        self._timers = Timers()
        self._tokens: Counter[str] = Counter()
        self._finished: Counter[str] = Counter()
        self._admission = Admission(limits, cache, scheduler)
        registry = ConversationRegistry(limits.max_conversations, limits.conversation_idle_s)
        manager = ConversationManager(scheduler, registry, triton or NoTriton(), journal, self._post)
        self.turns = TurnScheduler(self, scheduler, tokenizer, limits.context_length, manager)
        manager.restore()

    def prepare(self, turn: Turn) -> None:
        """Do what can be done for a turn before it is taken; any thread may.

        Raises:
            InvalidArgument: it can never be served.
        """
        sequence = turn.sequence
        if turn.start:
            self._admission.check(sequence.request)
        elif turn.messages is None:
            self._admission.check_prompt(sequence.request.prompt_ids)
        sequence.banned = banned_tokens(self._tokenizer, sequence.request.params.bad_words)

    def check_prompt(self, ids: Collection[int]) -> None:
        """Refuse a prompt, with the conversation before it, that can never be served; as ``Admission.check_prompt``."""
        self._admission.check_prompt(ids)

    def refusal(self, turn: Turn) -> Unavailable | None:
        """Why a turn can't be taken just now."""
        if self.draining:
            return Unavailable("the server is shutting down and takes no new requests")
        full = self._admission.queue_refusal(also_waiting=self.turns.queued)
        return self._admission.retain_refusal(turn.sequence) if full is None and turn.start else full

    def begin(self, sequence: Sequence, sink: Sink, held: KvState, since: float) -> None:
        """Queue a sequence without asking ``refusal``; after a fault in here it has not begun.

        Args:
            sequence: prepared.
            sink: where its deltas go.
            held: what it goes on with, computed of its first tokens.
            since: when its wait for a step has begun (``time.monotonic()``).
        """
        answer = AnswerBuilder(sequence.request, self._tokenizer, self._longest, sink, self.observations)
        sequence.end_ids = answer.end_ids
        if self._limits.queue_timeout_s:
            self._timers.add(since + self._limits.queue_timeout_s, "queue", sequence)
        self._scheduler.add(sequence, held)
        self._answers[sequence] = answer

    def await_deadline(self, sequence: Sequence) -> None:
        """End the answer so far when its deadline passes."""
        if sequence.request.deadline is not None:
            self._timers.add(sequence.request.deadline, "deadline", sequence)

    def answer_unbegun(
        self, sequence: Sequence, sink: Sink, reason: FinishReason | None = None, error: RequestError | None = None
    ) -> None:
        """End a sequence that was not begun with a reason or an error."""
        self._timers.forget(sequence)
        final = Delta("", (), error=error or _NO_END)
        with logged(log, "request %s has ended with a fault", sequence.request.id):
            answer = AnswerBuilder(sequence.request, self._tokenizer, self._longest, sink, self.observations)
            usage = answer.end(sequence, self._limits.kv_dtype)
            if error is None:
                final = Delta("", (), reason, usage=usage)
        self._send_final(sink, final)

    def cancel(self, sequence: Sequence, error: RequestError | None = None) -> None:
        """End a sequence's answer now, with ``error`` if given; nothing happens when it has ended already."""
        if sequence in self._answers:
            self.end(sequence, None if error else FinishReason.CANCELLED, error)
        else:
            self.turns.cancel(sequence)

    def end(self, sequence: Sequence, reason: FinishReason | None = None, error: RequestError | None = None) -> None:
        """End an answer that was begun."""
        self._end(sequence, reason=reason, error=error)

    def fail_all(self, error: RequestError) -> None:
        """End every answer with ``error``."""
        self.turns.fail_queued(error)
        for sequence in list(self._answers):
            with logged(log, "request %s has ended with a fault", sequence.request.id):
                self._end(sequence, error=error)

    def recover(self, error: RequestError) -> None:
        """After a fault outside of a step: end every answer, and trust nothing that was computed.

        A plan that was not carried out may have hashed blocks that nobody computed, and counted on copies.
        """
        self.failed_steps += 1
        self.fail_all(error)
        for sequence in [*self._scheduler.running, *self._scheduler.waiting]:
            # its end was the fault
            with logged(log, "request %s was taken out with a fault", sequence.request.id):
                self._scheduler.remove(sequence)
        self.turns.recover()
        self._cache.flush()

    @property
    def busy(self) -> bool:
        """Whether a step would do anything."""
        return bool(self._answers)

    @property
    def idle(self) -> bool:
        """Whether nobody waits for an answer."""
        return not self._answers and not self.turns.queued

    @property
    def wakes_at(self) -> float:
        """When it has something to do though nobody asked (``time.monotonic()``, or infinite): then ``tick``."""
        return min(self.turns.manager.registry.next_expiry, self._timers.next)

    def tick(self) -> None:
        """Do what is due between steps."""
        now = time.monotonic()
        self._end_overdue(now)
        self.turns.manager.expire(now)

    def step(self) -> None:
        """Plan, compute and commit one step. A fault ends the requests it touches, never the engine.

        Where the runner overlaps, what a step sends is delivered while the next one is computed: the host waits then,
        and so the threads that send have the time. All that decides about the next step is done before it is planned.
        """
        try:
            self._step()
        finally:
            self._holds_back = False
            if not self.busy:
                self._deliver()

    def _step(self) -> None:
        began = time.monotonic()
        self._end_overdue(began)
        plan = self._scheduler.plan()
        for piece in plan.slices:
            self._answers[piece.sequence].start(began)
        try:
            self._runner.move(plan)
            if not plan.slices:
                self._deliver()
                return
            run, overlaps = self._runner.run, self._runner.overlaps
            outcomes = iter(run(plan.slices, self._deliver) if overlaps else run(plan.slices))
        except Exception as error:  # noqa: BLE001 the boundary that keeps one step's fault from ending the server
            log.exception("a step of %d sequences failed", len(plan.slices))
            self.failed_steps += 1
            self._scheduler.abandon(plan)
            for piece in plan.slices:
                self._end(piece.sequence, error=Internal(f"the step failed: {error}"))
            return
        now = time.monotonic()
        self._holds_back = overlaps
        for piece in plan.slices:
            piece.sequence.computed = piece.start + piece.count
            if piece.samples:
                self._commit(piece.sequence, next(outcomes), now)
        self._observe(plan, now - began)

    def flush(self) -> int:
        """Drop the prefix cache; returns how many blocks could be found until now."""
        return self._cache.flush()

    def check_invariants(self) -> None:
        """Assert that every block is accounted for; O(blocks)."""
        for _ in self.check_in_parts():
            pass

    def check_in_parts(self) -> Iterator[None]:
        """As ``check_invariants``, with pauses of its own; it says nothing if the engine works in a pause."""
        yield from self._scheduler.check_in_parts()
        waiting, running = self._scheduler.waiting, self._scheduler.running
        assert len(waiting) + len(running) == len(self._answers), "a sequence without an answer, or the reverse"
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
        """End the answers whose deadline has passed, running or waiting, and those that waited too long to begin."""
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
        """Append what was sampled, and end the answer where it ends."""
        request, answer = sequence.request, self._answers[sequence]
        fail_after = self._limits.fail_after_tokens
        if fail_after and sequence.generated == fail_after and request.id.startswith("test-fail"):
            outcome = Internal(f"test_fail_after_tokens={fail_after}")
        try:
            if isinstance(outcome, Exception):
                raise outcome
            text, reason = answer.take(sequence, outcome, now)
        except Exception as error:  # noqa: BLE001 one answer's fault must not end its neighbours
            log.exception("request %s failed", request.id)
            self._end(sequence, error=as_request_error(error))
            return
        self._tokens["generated"] += 1
        if sequence.generated == 1:
            self._tokens["prompt"] += len(request.prompt_ids)
        if reason is None:
            self._send(answer.sink, Delta(text, (outcome,)))
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
        """Free or park what the sequence holds and send its final delta; text that was held back comes out first."""
        answer = self._answers.pop(sequence)
        self._timers.forget(sequence)
        final = Delta("", (), error=error or _NO_END)
        with logged(log, "request %s has ended with a fault", sequence.request.id):
            usage = answer.end(sequence, self._limits.kv_dtype)
            if error is None:
                text += answer.text.flush()
                if answer.text.stopped and reason is FinishReason.LENGTH:
                    reason = FinishReason.STOP
                final = Delta(text, tokens, reason, usage=usage)
        try:
            conversation = self.turns.settle(sequence, final.error)
        except Exception:
            # blocks may be lost, which is for who calls; it goes out all the same
            self._send_final(answer.sink, Delta("", (), error=_NO_END))
            raise
        self._send_final(answer.sink, final)
        if conversation is not None:
            self.turns.proceed(conversation)

    def _send_final(self, sink: Sink, final: Delta) -> None:
        self._finished["error" if final.error is not None else str(final.finish_reason)] += 1
        self._send(sink, final)

    def _send(self, sink: Sink, delta: Delta) -> None:
        self._post(partial(sink, delta))

    def _post(self, *calls: Callable[[], None]) -> None:
        """The one way out; in order, whatever is held back."""
        self._outbox.extend(calls)
        if not self._holds_back:
            self._deliver()

    def _deliver(self) -> None:
        """Deliver all there is, whatever one of the receivers does."""
        while self._outbox:
            # not `logged`, which would take a microsecond for every token
            try:
                self._outbox.popleft()()
            except Exception:  # noqa: BLE001 the others are to have theirs
                log.exception("something could not be delivered")
