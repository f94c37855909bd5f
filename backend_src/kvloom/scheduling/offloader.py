"""What those keep who do not run: conversations between two turns, and turns that wait to go on with them."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache
from kvloom.request import KvState, StepPlan


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


class Offloader:
    """Moves KV states down a ladder, the least recently used first: in blocks, copied to the host, nowhere.

    What is nowhere is computed again when it is needed; what others can find of its blocks may still be found then.

    Args:
        cache: where blocks come from.
        host: where the content of blocks is kept for those who gave them away; an empty pool: nowhere.
        costs: what giving blocks away costs.
    """

    def __init__(self, cache: BlockCache, host: BlockPool, costs: Costs):
        self._cache = cache
        self._host = host
        self._costs = costs
        # the least recently used first
        self._in_blocks: OrderedDict[KvState, None] = OrderedDict()
        self._on_host: OrderedDict[KvState, None] = OrderedDict()
        # whose copy to the host is planned, and what the plan reads there: it must not write over either
        self._arriving: set[KvState] = set()
        self._leaving: list[int] = []

    def end_plan(self) -> None:
        """A plan is complete; no other one is made before it is carried out."""
        self._arriving.clear()
        self._host.give(self._leaving)

    @property
    def blocks(self) -> int:
        """Number of blocks that would be given away, were all of them needed; shared ones count more than once."""
        return sum(len(kv_state.blocks) for kv_state in self._in_blocks)

    def keep(self, kv_state: KvState) -> None:
        """Take a KV state into care, as the most recently used one."""
        if kv_state.blocks:
            self._in_blocks[kv_state] = None
        elif kv_state.host_blocks:
            self._on_host[kv_state] = None

    def leave(self, kv_state: KvState) -> None:
        """Hand a KV state over to who runs with it, or takes it elsewhere."""
        self._in_blocks.pop(kv_state, None)
        self._on_host.pop(kv_state, None)

    def release(self, kv_state: KvState) -> None:
        """Free all that a KV state has: the one place where it ends."""
        self.leave(kv_state)
        self._cache.release(kv_state.blocks)
        self._host.give(kv_state.host_blocks)
        kv_state.computed = kv_state.hashed = kv_state.swapped = 0

    def shorten(self, kv_state: KvState, tokens: int) -> None:
        """Free what lies behind the first ``tokens`` tokens; of a block that they do not fill, nothing remains."""
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
        """Move the least recently used KV state, except ``but``, out of its blocks; False: there is none."""
        for kv_state in self._in_blocks:
            if kv_state is not but:
                del self._in_blocks[kv_state]
                if self.move_out(plan, kv_state, but):
                    self._on_host[kv_state] = None
                return True
        return False

    def move_out(self, plan: StepPlan, kv_state: KvState, but: KvState | None = None) -> bool:
        """Take a KV state's blocks; whether their content is copied to the host, because that pays and there is room.

        Older copies make room there, except that of ``but``.
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
        """Copy from the host what a KV state has there behind its first ``found`` blocks; it has its blocks by now."""
        if kv_state.swapped > kv_state.computed:
            there = len(kv_state.host_blocks)
            plan.swap_in.extend(zip(kv_state.host_blocks[found:], kv_state.blocks[found:there], strict=True))
            kv_state.computed = kv_state.swapped
        self._leaving.extend(kv_state.host_blocks)
        kv_state.host_blocks.clear()
        kv_state.swapped = 0

    def forget_copies(self, copied: set[int]) -> None:
        """Drop what is on these host blocks."""
        for kv_state in [kv_state for kv_state in self._on_host if not copied.isdisjoint(kv_state.host_blocks)]:
            self.release(kv_state)

    def check(self, running: Iterable[KvState]) -> list[KvState]:
        """Assert that every KV state in care is where it should be, and none of them runs; returns those in care."""
        assert all(kv_state.blocks and not kv_state.host_blocks for kv_state in self._in_blocks)
        assert all(kv_state.host_blocks and not kv_state.blocks for kv_state in self._on_host)
        assert not set(running) & (self._in_blocks.keys() | self._on_host.keys()), "who runs is in care too"
        return [*self._in_blocks, *self._on_host]

    def _make_host_room(self, blocks: int, but: KvState | None) -> bool:
        """See to it that so many host blocks are free, by dropping copies that were not used for longest."""
        if blocks > self._host.total:
            return False
        while self._host.free < blocks:
            oldest = next((kv_state for kv_state in self._on_host if kv_state is not but), None)
            if oldest is None or oldest in self._arriving:
                return False
            self.release(oldest)
        return True
