"""Keeps the KV states of sequences that don't run: conversations between two turns, and turns that wait."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache
from kvloom.request import KvState, StepPlan


@dataclass(frozen=True, slots=True)
class Costs:
    """What preemption costs. It is measured when the engine starts.

    Attributes:
        copy_block_s: seconds to copy a block to the host or back.
        compute_token_s: seconds to recompute a token's keys and values in prefill.
    """

    copy_block_s: float
    compute_token_s: float

    def swap_pays(self, blocks: int, tokens: int) -> bool:
        """Whether swapping out and in is faster than recomputing."""
        return 2 * blocks * self.copy_block_s < tokens * self.compute_token_s


class Offloader:
    """Frees device blocks by offloading KV states, the least recently used first.

    A KV state is in device blocks, on the host, or dropped. A dropped one is recomputed when it is needed, except for
    blocks that the prefix cache still has.

    Args:
        cache: the device's block pool.
        host: the host's block pool, for swapped blocks. It may be empty.
        costs: what preemption costs.
    """

    def __init__(self, cache: BlockCache, host: BlockPool, costs: Costs):
        self._cache = cache
        self._host = host
        self._costs = costs
        # the least recently used first
        self._in_blocks: OrderedDict[KvState, None] = OrderedDict()
        self._on_host: OrderedDict[KvState, None] = OrderedDict()
        # KV states that the plan copies to the host, and host blocks that it reads: it must overwrite neither
        self._arriving: set[KvState] = set()
        self._leaving: list[int] = []

    def end_plan(self) -> None:
        """Finish a plan. It must be executed before the next plan is made."""
        self._arriving.clear()
        self._host.give(self._leaving)

    @property
    def blocks(self) -> int:
        """Number of device blocks that offloading everything would release. Shared blocks count more than once."""
        return sum(len(kv_state.blocks) for kv_state in self._in_blocks)

    def keep(self, kv_state: KvState) -> None:
        """Start to keep a KV state, as the most recently used one."""
        if kv_state.blocks:
            self._in_blocks[kv_state] = None
        elif kv_state.host_blocks:
            self._on_host[kv_state] = None

    def leave(self, kv_state: KvState) -> None:
        """Stop keeping a KV state, without freeing it."""
        self._in_blocks.pop(kv_state, None)
        self._on_host.pop(kv_state, None)

    def release(self, kv_state: KvState) -> None:
        """Free all blocks of a KV state. No other method ends a KV state."""
        self.leave(kv_state)
        self._cache.release(kv_state.blocks)
        self._host.give(kv_state.host_blocks)
        kv_state.computed = kv_state.hashed = kv_state.swapped = 0

    def shorten(self, kv_state: KvState, tokens: int) -> None:
        """Keep only the blocks that the first ``tokens`` tokens fill completely, and free the others."""
        if tokens >= max(kv_state.computed, kv_state.swapped):
            return
        full = tokens // self._cache.block_size
        for table, take_back in ((kv_state.blocks, self._cache.release), (kv_state.host_blocks, self._host.give)):
            rest = table[full:]
            del table[full:]
            take_back(rest)
        kv_state.computed = min(kv_state.computed, full * self._cache.block_size)
        kv_state.swapped = min(kv_state.swapped, full * self._cache.block_size)
        kv_state.hashed = min(kv_state.hashed, full)
        if not (kv_state.blocks or kv_state.host_blocks):
            self.leave(kv_state)

    def give_way(self, plan: StepPlan, but: KvState | None = None) -> bool:
        """Offload the least recently used KV state other than ``but``. Returns False if there is none."""
        for kv_state in self._in_blocks:
            if kv_state is not but:
                del self._in_blocks[kv_state]
                if self.move_out(plan, kv_state, but):
                    self._on_host[kv_state] = None
                return True
        return False

    def move_out(self, plan: StepPlan, kv_state: KvState, but: KvState | None = None) -> bool:
        """Free a KV state's device blocks. Swap them to the host first if that pays and the host has room.

        Older KV states on the host are dropped to make room, except ``but``.

        Returns:
            Whether the blocks are swapped to the host.
        """
        blocks = blocks_for(kv_state.computed, self._cache.block_size)
        copied = blocks > 0 and self._costs.swap_pays(blocks, kv_state.computed) and self._make_host_room(blocks, but)
        if copied:
            kv_state.host_blocks.extend(self._host.take(blocks))
            kv_state.swapped = kv_state.computed
            plan.swap_out.extend(zip(kv_state.blocks[:blocks], kv_state.host_blocks, strict=True))
            self._arriving.add(kv_state)
        self._cache.release(kv_state.blocks)
        kv_state.computed = kv_state.hashed = 0
        return copied

    def move_in(self, plan: StepPlan, kv_state: KvState, found: int) -> None:
        """Plan to swap in a KV state's host blocks, except the first ``found``. It has its device blocks already."""
        if kv_state.swapped > kv_state.computed:
            there = len(kv_state.host_blocks)
            plan.swap_in.extend(zip(kv_state.host_blocks[found:], kv_state.blocks[found:there], strict=True))
            kv_state.computed = kv_state.swapped
        self._leaving.extend(kv_state.host_blocks)
        kv_state.host_blocks.clear()
        kv_state.swapped = 0

    def forget_copies(self, copied: set[int]) -> None:
        """Drop the KV states that have any of these host blocks."""
        for kv_state in [kv_state for kv_state in self._on_host if not copied.isdisjoint(kv_state.host_blocks)]:
            self.release(kv_state)

    def check(self, running: Iterable[KvState]) -> list[KvState]:
        """Assert that every kept KV state is where it should be, and that none of them runs. Returns all kept ones."""
        assert all(kv_state.blocks and not kv_state.host_blocks for kv_state in self._in_blocks)
        assert all(kv_state.host_blocks and not kv_state.blocks for kv_state in self._on_host)
        assert not set(running) & (self._in_blocks.keys() | self._on_host.keys()), "a running sequence is kept here"
        return [*self._in_blocks, *self._on_host]

    def _make_host_room(self, blocks: int, but: KvState | None) -> bool:
        """Get ``blocks`` free host blocks by dropping the least recently used KV states. Returns whether that works."""
        if blocks > self._host.total:
            return False
        while self._host.free < blocks:
            oldest = next((kv_state for kv_state in self._on_host if kv_state is not but), None)
            if oldest is None or oldest in self._arriving:
                return False
            self.release(oldest)
        return True
