"""Scheduler and pools without a model: memory is simulated, and every read is checked against what should be there."""

import itertools
import random
from collections.abc import Iterable

from kvloom.kv.blocks import BlockPool
from kvloom.kv.cache import BlockCache
from kvloom.request import Request, SamplingParams, Sequence, StepPlan
from kvloom.scheduling.scheduler import Costs, Scheduler

BLOCK = 4
ALWAYS_SWAP = Costs(copy_block_s=0.0, compute_token_s=1.0)
NEVER_SWAP = Costs(copy_block_s=1.0, compute_token_s=0.0)
GARBAGE = -1

_first_tokens = itertools.count(1000)


def unlike(length: int) -> list[int]:
    """A prompt that shares nothing with any other."""
    return [next(_first_tokens), *range(1, length)]


def counts(plan: StepPlan) -> dict[Sequence, int]:
    return {piece.sequence: piece.count for piece in plan.slices}


class Clock:
    """Stands for the time module where a test decides what time it is."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Rig:
    """Does what the engine does with a plan.

    The keys and values of a token are a function of its namespace, itself and all tokens before it. A slot of a
    simulated block holds a number that stands for exactly these; equal numbers mean equal content.

    Attributes:
        alive: sequences that were added and did not end.
    """

    def __init__(
        self,
        blocks: int = 100,
        host: int = 0,
        costs: Costs = NEVER_SWAP,
        max_running: int = 8,
        max_batch_tokens: int = 64,
        **cache: object,
    ):
        self.cache = BlockCache(blocks, BLOCK, **cache)
        self.host = BlockPool(host)
        self.scheduler = Scheduler(self.cache, self.host, costs, max_running, max_batch_tokens)
        self.alive: list[Sequence] = []
        self._device_memory = [[GARBAGE] * BLOCK for _ in range(blocks)]
        self._host_memory = [[GARBAGE] * BLOCK for _ in range(host)]
        self._numbers: dict[tuple[int | str, int], int] = {}
        self._contents: dict[Sequence, list[int]] = {}

    def add(self, prompt: Iterable[int], **request: object) -> Sequence:
        fields = {"id": "", "params": SamplingParams(seed=0), "arrival": 0.0, **request}
        sequence = Sequence(Request(prompt_ids=tuple(prompt), **fields))
        self._contents[sequence] = []
        self.alive.append(sequence)
        self.scheduler.add(sequence)
        return sequence

    def remove(self, sequence: Sequence) -> None:
        self.scheduler.remove(sequence)
        self.alive.remove(sequence)
        del self._contents[sequence]

    def step(self) -> StepPlan:
        """Plan, move, compute and commit; a sequence that outgrows the pool ends."""
        plan = self._moved()
        self._write(plan, {piece.sequence: self._content(piece.sequence) for piece in plan.slices})
        for piece in plan.slices:
            self._read(piece.sequence, piece.start + piece.count)
            piece.sequence.computed = piece.start + piece.count
            if piece.samples:
                piece.sequence.tokens.append(self.next_token(piece.sequence))
                if len(piece.sequence.tokens) > self.cache.total * BLOCK:
                    self.remove(piece.sequence)
        self.check()
        return plan

    def failing_step(self) -> StepPlan:
        """A step that leaves garbage in whatever it was to write."""
        plan = self._moved()
        self._write(plan, {piece.sequence: [GARBAGE] * len(piece.sequence.tokens) for piece in plan.slices})
        self.scheduler.abandon(plan)
        for piece in plan.slices:
            self.remove(piece.sequence)
        self.check()
        return plan

    def run(self, most: int = 10_000) -> None:
        """Step until everything ended; a stall would take for ever."""
        for _ in range(most):
            if not self.alive:
                break
            assert self.step().slices, "nobody goes on"
        assert not self.alive

    def check(self) -> None:
        for _ in self.scheduler.check_in_parts():
            pass
        for sequence in self.scheduler.running:
            self._read(sequence, sequence.computed)
        waiting = self.scheduler._found_for
        if waiting is not None:
            anew = self.cache.find(waiting.namespace, waiting.tokens)
            assert self.cache.find(waiting.namespace, waiting.tokens, self.scheduler._found) == anew

    @staticmethod
    def next_token(sequence: Sequence) -> int:
        """Of an alphabet so small that answers repeat each other; the same tokens are continued in the same way."""
        return random.Random(f"{sequence.tokens} {sequence.seed}").randrange(2)

    def _moved(self) -> StepPlan:
        plan = self.scheduler.plan()
        assert {piece.sequence for piece in plan.slices} == set(self.scheduler.running), "who runs is in every step"
        for block, host_block in plan.swap_out:
            self._host_memory[host_block] = list(self._device_memory[block])
        for host_block, block in plan.swap_in:
            self._device_memory[block] = list(self._host_memory[host_block])
        return plan

    def _write(self, plan: StepPlan, contents: dict[Sequence, list[int]]) -> None:
        """All writes of a step come before its reads, as in each layer of a forward."""
        written: set[tuple[int, int]] = set()
        for piece in plan.slices:
            assert piece.start == piece.sequence.computed
            assert piece.count > 0
            for position in range(piece.start, piece.start + piece.count):
                slot = piece.sequence.blocks[position // BLOCK], position % BLOCK
                assert slot not in written, "two sequences compute the same"
                written.add(slot)
                alone = self.cache._tables[slot[0]] == 1
                assert alone or slot[0] in self.cache._fresh, "what others read already is computed again"
                self._device_memory[slot[0]][slot[1]] = contents[piece.sequence][position]

    def _read(self, sequence: Sequence, end: int) -> None:
        content = self._content(sequence)
        for position in range(end):
            found = self._device_memory[sequence.blocks[position // BLOCK]][position % BLOCK]
            assert found == content[position], f"token {position} sees what is not its own"

    def _content(self, sequence: Sequence) -> list[int]:
        content = self._contents[sequence]
        for token in sequence.tokens[len(content) :]:
            before = content[-1] if content else sequence.namespace
            content.append(self._numbers.setdefault((before, token), len(self._numbers)))
        return content
