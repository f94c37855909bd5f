"""Which tokens of which sequence run in this step. No tensors, no phases.

A sequence knows more tokens than it has computed; a step computes some of the difference. Prefill in chunks, resumed
and recomputed sequences and decoding are all that one rule.
"""

from collections import deque

from kvloom.kv.blocks import BlockPool
from kvloom.request import Sequence, Slice


class Scheduler:
    """Owns who waits, who runs and who has which blocks.

    Args:
        pool: where blocks come from.
        max_running: most sequences in a step.
        max_batch_tokens: most tokens in a step; bounds the running sequences too.
    """

    def __init__(self, pool: BlockPool, max_running: int, max_batch_tokens: int):
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []
        self.preemptions = 0
        self._pool = pool
        # every running sequence decodes in every step, so that none is starved
        self._max_running = min(max_running, max_batch_tokens)
        self._max_batch_tokens = max_batch_tokens

    def add(self, sequence: Sequence) -> None:
        """Let a sequence wait for its turn."""
        self.waiting.append(sequence)

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out, running or waiting, and free its blocks: the one place where a sequence leaves."""
        if sequence in self.running:
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)
        self._pool.release(sequence.blocks)

    def plan(self) -> list[Slice]:
        """Choose the next step: running sequences first, then admissions, within the token budget."""
        self._make_room()
        slices: list[Slice] = []
        budget = self._max_batch_tokens
        # decodes before prefill chunks, so that a long prompt never holds up running streams
        for sequence in sorted(self.running, key=lambda running: running.pending > 1):
            count = min(sequence.pending, budget)
            if count:
                slices.append(Slice(sequence, sequence.computed, count))
                budget -= count
        while budget and self.waiting and len(self.running) < self._max_running:
            sequence = self.waiting[0]
            # all its known tokens at once: what is let in must not be what is thrown out in the next step
            if not self._pool.extend(sequence.blocks, len(sequence.tokens)):
                break
            self.running.append(self.waiting.popleft())
            count = min(sequence.pending, budget)
            slices.append(Slice(sequence, sequence.computed, count))
            budget -= count
        return slices

    def _make_room(self) -> None:
        """Give every running sequence blocks for its known tokens, preempting the latest ones where needed."""
        index = 0
        while index < len(self.running):
            sequence = self.running[index]
            if self._pool.extend(sequence.blocks, len(sequence.tokens)):
                index += 1
            else:
                assert len(self.running) > 1, "a sequence ends before it outgrows the whole pool"
                self._preempt(self.running[-1])

    def _preempt(self, sequence: Sequence) -> None:
        """Drop a sequence's cache; it waits at the front and is recomputed from the tokens it knows."""
        self.running.remove(sequence)
        self._pool.release(sequence.blocks)
        sequence.computed = 0
        sequence.preemptions += 1
        self.waiting.appendleft(sequence)
        self.preemptions += 1
