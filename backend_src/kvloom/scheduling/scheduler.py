"""Which tokens of which sequence run in this step. No tensors, no phases.

A sequence knows more tokens than it has computed; a step computes some of the difference. Prefill in chunks, prefixes
that were found, resumed and recomputed sequences and decoding are all that one rule.
"""

import bisect
import itertools
import time
from collections.abc import Iterator

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache, Found
from kvloom.request import KvState, Sequence, Slice, StepPlan
from kvloom.scheduling.offloader import Costs, Offloader
from kvloom.scheduling.waiting import Waiting

AGEING_S = 5.0
"""Seconds of waiting that count as much as one level of priority."""


class Scheduler:
    """Owns who waits, who runs and who has which blocks.

    What a conversation keeps between two turns is in the care of ``Offloader``, also while a turn that goes on with it
    waits. It gives way to everybody who runs or is about to.

    Sequences are ranked by arrival, AGEING_S earlier for each level of priority: so a waiting one gains a level in that
    time, and ranks never change. The first rank is let in first, the last one gives its blocks away first.

    Args:
        cache: where blocks come from.
        host: where the content of blocks is kept for those who gave them away; an empty pool: nowhere.
        costs: what giving blocks away costs.
        max_running: maximum number of sequences in a step.
        max_batch_tokens: maximum number of tokens in a step; bounds the running sequences too.

    Attributes:
        swaps: preemptions whose blocks were copied to the host.
        recomputes: preemptions whose blocks were dropped.
        prefix_queried: prompt tokens that were looked for in the cache.
        prefix_hit: those that were found.
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
        # every running sequence decodes in every step, so that none is starved
        self._max_running = min(max_running, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._arrivals = itertools.count()
        # what was found of whom, when there were not enough blocks for the rest
        self._found_for: Sequence | None = None
        self._found = Found([], None)

    @property
    def free_places(self) -> int:
        """How many more sequences may run at once, if there are blocks for them."""
        return self._max_running - len(self.running)

    def add(self, sequence: Sequence, held: KvState | None = None) -> None:
        """Let a new sequence wait for its turn; it goes on with what was ``held`` of its first tokens."""
        request = sequence.request
        sequence.rank = (request.arrival - AGEING_S * request.priority, next(self._arrivals))
        if held is not None:
            self._offloader.leave(held)
            held.move_to(sequence)
            self._offloader.keep(sequence)
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free what it holds."""
        self._take_out(sequence)
        self._offloader.release(sequence)

    def park(self, sequence: Sequence) -> KvState:
        """Take a sequence out, and keep what is computed of it until ``add`` or ``discard`` gets what is returned."""
        self._take_out(sequence)
        self._offloader.leave(sequence)
        held = KvState()
        sequence.move_to(held)
        self._offloader.keep(held)
        return held

    def shorten(self, held: KvState, tokens: int) -> None:
        """Keep no more than the first ``tokens`` tokens of what was parked."""
        self._offloader.shorten(held, tokens)

    def discard(self, held: KvState) -> None:
        """Free what was parked."""
        self._offloader.release(held)

    def plan(self) -> StepPlan:
        """Choose the next step: running sequences first, then admissions, within the token budget."""
        self._cache.begin(time.monotonic())
        plan = StepPlan()
        self._make_room(plan)
        budget = self._max_batch_tokens
        # decodes before prefill chunks, so that a long prompt never holds up running streams
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
        """Undo what the last plan promised, because its step failed; who runs is in its slices, and to be removed."""
        self._cache.drop_fresh()
        # the copies may be what failed
        copied = {block for _, block in plan.swap_out}
        self._offloader.forget_copies(copied)
        for sequence in self.waiting:
            if not copied.isdisjoint(sequence.host_blocks):
                self._host.give(sequence.host_blocks)
                sequence.swapped = 0

    def check_in_parts(self) -> Iterator[None]:
        """Assert the invariants of both pools; O(blocks), with pauses as ``BlockCache.check_in_parts``."""
        kept = self._offloader.check(self.running)
        preempted = set(self.waiting) - set(kept)
        yield from self._cache.check_in_parts(kv_state.blocks for kv_state in [*self.running, *kept])
        self._host.check([kv_state.host_blocks for kv_state in [*preempted, *kept]])
        assert all(not sequence.blocks for sequence in preempted), "a waiting sequence has blocks"
        assert all(not sequence.host_blocks for sequence in self.running), "a running sequence has host blocks"

    def _take_out(self, sequence: Sequence) -> None:
        """The one place where a sequence leaves."""
        if sequence is self._found_for:
            # nobody else would let go of it
            self._found_for = None
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        request = sequence.request
        if request.retain_s and sequence.blocks:
            # the prompt's last block, too, where an earlier request computed and hashed it
            self._cache.follow(sequence)
            hashed = min(sequence.hashed, len(request.prompt_ids) // self._cache.block_size)
            until = float("inf") if request.retain_s < 0 else time.monotonic() + request.retain_s
            self._cache.retain(sequence.blocks[:hashed], until)

    def _slice(self, plan: StepPlan, sequence: Sequence, budget: int) -> int:
        """Plan as many of a sequence's tokens as ``budget`` allows; returns how many."""
        count = min(sequence.pending, budget)
        if count:
            plan.slices.append(Slice(sequence, sequence.computed, count))
            self._cache.hash_computed(sequence, sequence.computed + count)
        return count

    def _make_room(self, plan: StepPlan) -> None:
        """Give every running sequence blocks for its known tokens; conversations, then the last ranks give way."""
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
                assert had_retained, "a sequence ends before it outgrows the whole pool"

    def _preempt(self, plan: StepPlan, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits, and goes on from a copy on the host or from the tokens it knows."""
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
        """Whether a running sequence's next token needs another block."""
        return len(sequence.tokens) == len(sequence.blocks) * self._cache.block_size

    def _admit(self, plan: StepPlan, reserve: int) -> Sequence | None:
        """Let the first in rank run, if there are blocks for all its known tokens; nobody overtakes it.

        ``reserve`` blocks are left for those who run: what is let in must not be what is thrown out in the next step.
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
        """The blocks that can be found of the first in rank, who may have waited here for many steps."""
        before = self._found if sequence is self._found_for else None
        self._found_for, self._found = sequence, self._cache.find(sequence.namespace, sequence.tokens, before)
        return self._found.blocks

    def _get_blocks(self, plan: StepPlan, sequence: Sequence, found: list[int], reserve: int) -> bool:
        """Give a sequence that is to run blocks for its known tokens; False: there are not enough."""

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
        """Count prompt tokens that were found; a sequence that finds its own again after preemption hits nothing."""
        if sequence.preemptions:
            return 0
        tokens = min(tokens, len(sequence.request.prompt_ids) - sequence.cached)
        sequence.cached += tokens
        return tokens
