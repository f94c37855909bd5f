"""Chooses the tokens that each step computes. No tensors, no phases.

A sequence knows more tokens than it has computed, and a step computes some of the difference. This one rule covers
chunked prefill, prefix cache hits, resumed and recomputed sequences, and decoding.
"""

import bisect
import itertools
import time
from collections.abc import Iterator

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache
from kvloom.kv.prefix_index import Found
from kvloom.request import KvState, Sequence, Slice, StepPlan
from kvloom.scheduling.offloader import Costs, Offloader
from kvloom.scheduling.waiting import Waiting

AGEING_S = 5.0
"""Seconds of waiting that count as much as one level of priority."""


class Scheduler:
    """Manages waiting and running sequences and their blocks.

    ``Offloader`` keeps a conversation's KV state between two turns and while the next turn waits. Sequences that run
    or start may take its blocks.

    Sequences are ranked by arrival time, which counts as AGEING_S earlier per level of priority. So a waiting sequence
    gains a level every AGEING_S, and ranks never change. The first in rank is admitted first, and the last in rank is
    preempted first.

    Args:
        cache: the device's block pool.
        host: the host's block pool, for swapped blocks. It may be empty.
        costs: what preemption costs.
        max_running: maximum number of sequences in a step.
        max_batch_tokens: maximum number of tokens in a step. It also limits the running sequences.

    Attributes:
        swaps: number of preemptions by swapping.
        recomputes: number of preemptions by recomputation.
        prefix_queried: prompt tokens that were looked up in the prefix cache.
        prefix_hit: prompt tokens that were found there.
    """

    def __init__(self, cache: BlockCache, host: BlockPool, costs: Costs, max_running: int, max_batch_tokens: int):
        self.waiting = Waiting()
        self.running: list[Sequence] = []
        self.swaps = 0
        self.recomputes = 0
        self.prefix_queried = 0
        self.prefix_hit = 0
        self._cache = cache
        self._host = host
        self._offloader = Offloader(cache, host, costs)
        # Every running sequence decodes in every step, so that none starves
        self._max_running = min(max_running, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._arrivals = itertools.count()
        # The last prefix lookup for a sequence that could not be admitted, to be continued in the next step
        self._found_for: Sequence | None = None
        self._found = Found([], None)

    @property
    def free_places(self) -> int:
        """How many more sequences may run, if there are enough blocks."""
        return self._max_running - len(self.running)

    def add(self, sequence: Sequence, held: KvState | None = None) -> None:
        """Queue a new sequence. It takes over the KV state ``held`` of its first tokens."""
        request = sequence.request
        sequence.rank = (request.arrival - AGEING_S * request.priority, next(self._arrivals))
        if held is not None:
            self._offloader.leave(held)
            held.move_to(sequence)
            self._offloader.keep(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Remove a running or waiting sequence and free its blocks."""
        self._take_out(sequence)
        self._offloader.release(sequence)

    def park(self, sequence: Sequence) -> KvState:
        """Remove a sequence but keep its KV state. Pass the result to ``add`` or ``discard`` later."""
        self._take_out(sequence)
        self._offloader.leave(sequence)
        held = KvState()
        sequence.move_to(held)
        self._offloader.keep(held)
        return held

    def shorten(self, held: KvState, tokens: int) -> None:
        """Keep no more than the first ``tokens`` tokens of a parked KV state."""
        self._offloader.shorten(held, tokens)

    def discard(self, held: KvState) -> None:
        """Free a parked KV state."""
        self._offloader.release(held)

    def plan(self) -> StepPlan:
        """Plan the next step within the token budget: running sequences first, then admissions."""
        self._cache.begin(time.monotonic())
        plan = StepPlan()
        self._make_room(plan)
        budget = self._max_batch_tokens
        # Decodes come before prefill chunks, so that a long prompt never delays running streams
        for sequence in sorted(self.running, key=lambda running: running.pending > 1):
            self.prefix_hit += self._hit(sequence, self._cache.follow(sequence))
            budget -= self._slice(plan, sequence, budget)
        reserve = sum(self._fills_its_blocks(sequence) for sequence in self.running)
        while budget and self.free_places:
            admitted = self._admit(plan, reserve)
            if admitted is None:
                break
            reserve += self._fills_its_blocks(admitted)
            budget -= self._slice(plan, admitted, budget)
        self._offloader.end_plan()
        return plan

    def abandon(self, plan: StepPlan) -> None:
        """Undo the last plan, because its step failed. The caller has to remove the sequences in its slices."""
        self._cache.drop_fresh()
        # The swap copies may have failed
        copied = {block for _, block in plan.swap_out}
        self._offloader.forget_copies(copied)
        for sequence in self.waiting:
            if not copied.isdisjoint(sequence.host_blocks):
                self._host.give(sequence.host_blocks)
                sequence.swapped = 0

    def check_in_parts(self) -> Iterator[None]:
        """Assert the invariants of both pools. O(blocks), with pauses like ``BlockCache.check_in_parts``."""
        kept = self._offloader.check(self.running)
        preempted = set(self.waiting) - set(kept)
        yield from self._cache.check_in_parts(kv_state.blocks for kv_state in [*self.running, *kept])
        self._host.check([kv_state.host_blocks for kv_state in [*preempted, *kept]])
        assert all(not sequence.blocks for sequence in preempted), "a waiting sequence has blocks"
        assert all(not sequence.host_blocks for sequence in self.running), "a running sequence has host blocks"

    def _take_out(self, sequence: Sequence) -> None:
        """Take a running or waiting sequence out. No other method does that."""
        if sequence is self._found_for:
            # This reference would keep the sequence in memory
            self._found_for = None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        request = sequence.request
        if request.retain_s and sequence.blocks:
            # This also covers the prompt's last block if an earlier request has hashed it
            self._cache.follow(sequence)
            hashed = min(sequence.hashed, len(request.prompt_ids) // self._cache.block_size)
            until = float("inf") if request.retain_s < 0 else time.monotonic() + request.retain_s
            self._cache.retain(sequence.blocks[:hashed], until)

    def _slice(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Plan as many of a sequence's tokens as ``budget`` allows. Returns how many."""
        count = min(sequence.pending, budget)
        if count:
            plan.slices.append(Slice(sequence, sequence.computed, count))
            self._cache.hash_computed(sequence, sequence.computed + count)
        return count

    def _make_room(self, plan: StepPlan) -> None:
        """Allocate blocks for all known tokens of the running sequences.

        If blocks are short, idle conversations are offloaded first, then the last sequences in rank are preempted.
        """
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._cache.extend(sequence.blocks, len(sequence.tokens)):
                index += 1
            elif self._offloader.give_way(plan):
                continue
            elif len(self.running) > 1:
                self._preempt(plan, self.running[-1])
            else:
                had_retained = self._cache.stop_retaining()
                assert had_retained, "a sequence has outgrown the whole block pool"

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        """Preempt a sequence. It waits and later resumes from the host's copy, or recomputes its tokens."""
        if self._offloader.move_out(plan, sequence):
            self.swaps += 1
            self._wait_again(sequence)
        else:
            self._drop(sequence)

    def _drop(self, sequence: Sequence) -> None:
        self.recomputes += 1
        self._wait_again(sequence)

    def _wait_again(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._cache.release(sequence.blocks)
        sequence.computed = sequence.hashed = 0
        sequence.preemptions += 1
        self.waiting.add(sequence)

    def _fills_its_blocks(self, sequence: Sequence) -> bool:
        """Whether the next token of a running sequence needs another block."""
        return len(sequence.tokens) == len(sequence.blocks) * self._cache.block_size

    def _admit(self, plan: StepPlan, reserve: int) -> Sequence | None:
        """Admit the first sequence in rank if there are blocks for all its known tokens. No other overtakes it.

        ``reserve`` blocks stay available for running sequences, so that a new sequence is not preempted in the next
        step.
        """
        sequence = self.waiting.first()
        if sequence is None:
            return None
        looked_up = not (sequence.blocks or sequence.swapped or sequence.preemptions)
        found = [] if sequence.blocks else self._find(sequence)
        if not self._get_blocks(plan, sequence, found, reserve):
            return None
        self._found_for = None
        bisect.insort(self.running, self.waiting.take(), key=lambda running: running.rank)
        self._offloader.leave(sequence)
        if found:
            sequence.hashed = len(found)
            sequence.computed = len(found) * self._cache.block_size
        self._offloader.move_in(plan, sequence, len(found))
        self._cache.hash_computed(sequence, sequence.computed)
        hit = self._hit(sequence, sequence.computed)
        if looked_up and self._cache.shares:
            self.prefix_queried += len(sequence.tokens)
            self.prefix_hit += hit
        return sequence

    def _find(self, sequence: Sequence) -> list[int]:
        """Look up the prefix of the first sequence in rank. If it has waited for many steps, the lookup continues."""
        before = self._found if sequence is self._found_for else None
        self._found_for, self._found = sequence, self._cache.find(sequence.namespace, sequence.tokens, before)
        return self._found.blocks

    def _get_blocks(self, plan: StepPlan, sequence: Sequence, found: list[int], reserve: int) -> bool:
        """Allocate blocks for the known tokens of a sequence to admit. Returns False if there are not enough."""

        def get() -> bool:
            if sequence.blocks:
                return self._cache.extend(sequence.blocks, len(sequence.tokens), spare=reserve)
            return self._cache.open(sequence.blocks, found, len(sequence.tokens), spare=reserve)

        if get():
            return True
        needed = blocks_for(len(sequence.tokens), self._cache.block_size) + reserve
        within_reach = self._cache.total - self._cache.used + self._offloader.blocks + len(found)
        while not get():
            if needed <= within_reach and self._offloader.give_way(plan, but=sequence):
                continue
            if self.running or not self._cache.stop_retaining():
                return False
        return True

    def _hit(self, sequence: Sequence, tokens: int) -> int:
        """Count prompt tokens that were found in the prefix cache. After a preemption nothing counts."""
        if sequence.preemptions:
            return 0
        tokens = min(tokens, len(sequence.request.prompt_ids) - sequence.cached)
        sequence.cached += tokens
        return tokens
