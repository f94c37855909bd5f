"""The scheduler and the pools without a model. Memory is simulated, and every read is checked."""

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
    """Replaces the module ``time``. The test sets the time."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Rig:
    """Executes plans like the engine.

    The keys and values of a token depend on its namespace, the token itself and all tokens before it. A slot of a
    simulated block holds a number for exactly these: equal numbers mean equal content.

    Attributes:
        alive: the sequences that were added and have not ended.
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
        """Plan, move, compute and commit. A sequence that needs more than the whole pool ends."""
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
        """Run a step that fails and leaves garbage in the slots that it writes."""
        plan = self._moved()
        self._write(plan, {piece.sequence: [GARBAGE] * len(piece.sequence.tokens) for piece in plan.slices})
        self.scheduler.abandon(plan)
        for piece in plan.slices:
            self.remove(piece.sequence)
        self.check()
        return plan

    def run(self, most: int = 10_000) -> None:
        """Step until all sequences have ended. Fails if no sequence makes progress."""
        for _ in range(most):
            if not self.alive:
                break
            assert self.step().slices, "no sequence makes progress"
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
        """The next token, which depends on the tokens and the seed. There are only two, so that answers repeat."""
        return random.Random(f"{sequence.tokens} {sequence.seed}").randrange(2)

    def _moved(self) -> StepPlan:
        plan = self.scheduler.plan()
        running = set(self.scheduler.running)
        assert {piece.sequence for piece in plan.slices} == running, "a running sequence is missing in the step"
        for block, host_block in plan.swap_out:
            self._host_memory[host_block] = list(self._device_memory[block])
        for host_block, block in plan.swap_in:
            self._device_memory[block] = list(self._host_memory[host_block])
        return plan

    def _write(self, plan: StepPlan, contents: dict[Sequence, list[int]]) -> None:
        """Do all writes of a step. They come before its reads, as in each layer of a forward pass."""
        written: set[tuple[int, int]] = set()
        for piece in plan.slices:
            assert piece.start == piece.sequence.computed
            assert piece.count > 0
            for position in range(piece.start, piece.start + piece.count):
                slot = piece.sequence.blocks[position // BLOCK], position % BLOCK
                assert slot not in written, "two sequences write the same slot"
                written.add(slot)
                alone = self.cache._tables[slot[0]] == 1
                assert alone or slot[0] in self.cache._fresh, "a block that others already read is written again"
                self._device_memory[slot[0]][slot[1]] = contents[piece.sequence][position]

    def _read(self, sequence: Sequence, end: int) -> None:
        content = self._content(sequence)
        for position in range(end):
            found = self._device_memory[sequence.blocks[position // BLOCK]][position % BLOCK]
            assert found == content[position], f"token {position} has wrong content"

    def _content(self, sequence: Sequence) -> list[int]:
        content = self._contents[sequence]
        for token in sequence.tokens[len(content) :]:
            before = content[-1] if content else sequence.namespace
            content.append(self._numbers.setdefault((before, token), len(self._numbers)))
        return content
