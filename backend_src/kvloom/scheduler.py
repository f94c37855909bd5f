"""Which tokens of which sequence run in this step. No tensors, no phases.

A sequence knows more tokens than it has computed; a step computes some of the difference. Prefill in chunks, prefixes
that were found, resumed and recomputed sequences and decoding are all that one rule.
"""

import bisect
import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache
from kvloom.request import Plan, Sequence, Slice
from kvloom.waiting import Waiting

AGEING_S = 5.0
"""Seconds of waiting that count as much as one level of priority."""


@dataclass(frozen=True, slots=True)
class Costs:
    """What giving blocks away costs, measured when the engine starts.

    Attributes:
        copy_block_s: seconds to copy a block to the host or back.
        compute_token_s: seconds to compute a token's keys and values again, in prefill.
    """

    copy_block_s: float
    compute_token_s: float

    def swap_pays(self, blocks: int, tokens: int) -> bool:
        """Whether copying out and in is faster than computing again."""
        return 2 * blocks * self.copy_block_s < tokens * self.compute_token_s


class Scheduler:
    """Owns who waits, who runs and who has which blocks.

    Sequences are ranked by arrival, AGEING_S earlier for each level of priority: so a waiting one gains a level in that
    time, and ranks never change. The first rank is let in first, the last one gives its blocks away first.

    Args:
        cache: where blocks come from.
        host: where the content of blocks is kept for those who gave them away; an empty pool: nowhere.
        costs: what giving blocks away costs.
        max_running: most sequences in a step.
        max_batch_tokens: most tokens in a step; bounds the running sequences too.

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
        self._costs = costs
        # every running sequence decodes in every step, so that none is starved
        self._max_running = min(max_running, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens
        self._arrivals = itertools.count()

    @property
    def free_places(self) -> int:
        """How many more sequences may run at once, if there are blocks for them."""
        return self._max_running - len(self.running)

    def add(self, sequence: Sequence) -> None:
        """Let a new sequence wait for its turn."""
        request = sequence.request
        sequence.rank = (request.arrival - AGEING_S * request.priority, next(self._arrivals))
        self.waiting.add(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free its blocks: the one place where a sequence leaves."""
        if sequence in self.waiting:
            self.waiting.remove(sequence)
        else:
            self.running.remove(sequence)
        request = sequence.request
        if request.retain_s and sequence.blocks:
            # the prompt's last block, too, where an earlier request computed and listed it
            self._cache.follow(sequence)
            listed = min(sequence.listed, len(request.prompt_ids) // self._cache.block_size)
            until = float("inf") if request.retain_s < 0 else time.monotonic() + request.retain_s
            self._cache.retain(sequence.blocks[:listed], until)
        self._cache.release(sequence.blocks)
        self._host.give(sequence.host_blocks)

    def plan(self) -> Plan:
        """Choose the next step: running sequences first, then admissions, within the token budget."""
        self._cache.begin(time.monotonic())
        plan = Plan()
        self._make_room(plan)
        budget = self._max_batch_tokens
        # decodes before prefill chunks, so that a long prompt never holds up running streams
        for sequence in sorted(self.running, key=lambda running: running.pending > 1):
            self._hit(sequence, self._cache.follow(sequence))
            budget -= self._slice(plan, sequence, budget)
        reserve = sum(self._fills_its_blocks(sequence) for sequence in self.running)
        while budget and self.free_places:
            admitted = self._admit(plan, reserve)
            if admitted is None:
                break
            reserve += self._fills_its_blocks(admitted)
            budget -= self._slice(plan, admitted, budget)
        return plan

    def abandon(self, plan: Plan) -> None:
        """Undo what the last plan promised, because its step failed; the sequences of its slices are to be removed."""
        lost = self._cache.drop_fresh()
        failed = {piece.sequence for piece in plan.slices}
        for sequence in [running for running in self.running if running not in failed]:
            if not lost.isdisjoint(sequence.blocks):
                # it relied on a neighbour that was to compute its prefix
                self._drop(sequence)
        copied = {block for _, block in plan.swap_out}
        for sequence in self.waiting:
            if not copied.isdisjoint(sequence.host_blocks):
                # the copy may be what failed
                self._host.give(sequence.host_blocks)
                sequence.swapped = 0

    def check(self) -> None:
        """Assert the invariants of both pools; O(blocks)."""
        self._cache.check(sequence.blocks for sequence in self.running)
        self._host.check([sequence.host_blocks for sequence in self.waiting])
        assert all(not sequence.blocks for sequence in self.waiting), "a waiting sequence has blocks"
        assert all(not sequence.host_blocks for sequence in self.running), "a running sequence has host blocks"

    def _slice(self, plan: Plan, sequence: Sequence, budget: int) -> int:
        """Plan as many of a sequence's tokens as ``budget`` allows; returns how many."""
        count = min(sequence.pending, budget)
        if count:
            plan.slices.append(Slice(sequence, sequence.computed, count))
            self._cache.list_computed(sequence, sequence.computed + count)
        return count

    def _make_room(self, plan: Plan) -> None:
        """Give every running sequence blocks for its known tokens, preempting the last ranks where needed."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._cache.extend(sequence.blocks, len(sequence.tokens)):
                index += 1
            elif len(self.running) > 1:
                self._preempt(plan, self.running[-1])
            else:
                had_retained = self._cache.stop_retaining()
                assert had_retained, "a sequence ends before it outgrows the whole pool"

    def _preempt(self, plan: Plan, sequence: Sequence) -> None:
        """Take a sequence's blocks; it waits, and goes on from a copy on the host or from the tokens it knows."""
        blocks = blocks_for(sequence.computed, self._cache.block_size)
        if blocks <= self._host.free and self._costs.swap_pays(blocks, sequence.computed):
            sequence.host_blocks.extend(self._host.take(blocks))
            sequence.swapped = sequence.computed
            plan.swap_out.extend(zip(sequence.blocks[:blocks], sequence.host_blocks, strict=True))
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
        sequence.computed = sequence.listed = 0
        sequence.preemptions += 1
        self.waiting.add(sequence)

    def _fills_its_blocks(self, sequence: Sequence) -> bool:
        """Whether a running sequence's next token needs another block."""
        return len(sequence.tokens) == len(sequence.blocks) * self._cache.block_size

    def _admit(self, plan: Plan, reserve: int) -> Sequence | None:
        """Let the first in rank run, if there are blocks for all its known tokens; nobody overtakes it.

        ``reserve`` blocks are left for those who run: what is let in must not be what is thrown out in the next step.
        """
        sequence = self.waiting.first()
        if sequence is None:
            return None
        found = self._cache.match(sequence.namespace, sequence.tokens)
        while not self._cache.open(sequence.blocks, found, len(sequence.tokens), spare=reserve):
            if self.running or not self._cache.stop_retaining():
                return None
        bisect.insort(self.running, self.waiting.take(), key=lambda running: running.rank)
        sequence.listed = len(found)
        sequence.computed = len(found) * self._cache.block_size
        if self._cache.shares and not sequence.preemptions:
            self.prefix_queried += len(sequence.tokens)
        self._hit(sequence, sequence.computed)
        if sequence.swapped > sequence.computed:
            plan.swap_in.extend(_after(len(found), sequence))
            sequence.computed = sequence.swapped
            self._cache.list_computed(sequence, sequence.computed)
        self._host.give(sequence.host_blocks)
        sequence.swapped = 0
        return sequence

    def _hit(self, sequence: Sequence, tokens: int) -> None:
        """Count prompt tokens that were found; a sequence that finds its own again after preemption hits nothing."""
        if not sequence.preemptions:
            tokens = min(tokens, len(sequence.request.prompt_ids) - sequence.cached)
            sequence.cached += tokens
            self.prefix_hit += tokens


def _after(found: int, sequence: Sequence) -> Iterator[tuple[int, int]]:
    """(host block, device block) of what a swapped sequence did not find in the cache."""
    return zip(sequence.host_blocks[found:], sequence.blocks[found : len(sequence.host_blocks)], strict=True)
