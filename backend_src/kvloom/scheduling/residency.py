"""What those keep who do not run: conversations between two turns, and turns that wait to go on with them."""

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from kvloom.kv.blocks import BlockPool, blocks_for
from kvloom.kv.cache import BlockCache
from kvloom.request import Holding, Plan


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


class Residency:
    """Moves holdings down a ladder, the least recently used first: in blocks, copied to the host, nowhere.

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
        self._in_blocks: OrderedDict[Holding, None] = OrderedDict()
        self._on_host: OrderedDict[Holding, None] = OrderedDict()
        # whose copy to the host is planned, and what the plan reads there: it must not write over either
        self._arriving: set[Holding] = set()
        self._leaving: list[int] = []

    def end_plan(self) -> None:
        """A plan is complete; no other one is made before it is carried out."""
        self._arriving.clear()
        self._host.give(self._leaving)

    @property
    def blocks(self) -> int:
        """Number of blocks that would be given away, were all of them needed; shared ones count more than once."""
        return sum(len(holding.blocks) for holding in self._in_blocks)

    def keep(self, holding: Holding) -> None:
        """Take a holding into care, as the most recently used one."""
        if holding.blocks:
            self._in_blocks[holding] = None
        elif holding.host_blocks:
            self._on_host[holding] = None

    def leave(self, holding: Holding) -> None:
        """Hand a holding over to who runs with it, or takes it elsewhere."""
        self._in_blocks.pop(holding, None)
        self._on_host.pop(holding, None)

    def release(self, holding: Holding) -> None:
        """Free all that a holding has: the one place where it ends."""
        self.leave(holding)
        self._cache.release(holding.blocks)
        self._host.give(holding.host_blocks)
        holding.computed = holding.listed = holding.swapped = 0

    def shorten(self, holding: Holding, tokens: int) -> None:
        """Free what lies behind the first ``tokens`` tokens; of a block that they do not fill, nothing remains."""
        if tokens >= max(holding.computed, holding.swapped):
            return
        full = tokens // self._cache.block_size
        for table, take_back in ((holding.blocks, self._cache.release), (holding.host_blocks, self._host.give)):
            rest = table[full:]
            del table[full:]
            take_back(rest)
        holding.computed = min(holding.computed, full * self._cache.block_size)
        holding.swapped = min(holding.swapped, full * self._cache.block_size)
        holding.listed = min(holding.listed, full)
        if not (holding.blocks or holding.host_blocks):
            self.leave(holding)

    def give_way(self, plan: Plan, but: Holding | None = None) -> bool:
        """Move the least recently used holding, except ``but``, out of its blocks; False: there is none."""
        for holding in self._in_blocks:
            if holding is not but:
                del self._in_blocks[holding]
                if self.move_out(plan, holding, but):
                    self._on_host[holding] = None
                return True
        return False

    def move_out(self, plan: Plan, holding: Holding, but: Holding | None = None) -> bool:
        """Take a holding's blocks; whether their content is copied to the host, because that pays and there is room.

        Older copies make room there, except that of ``but``.
        """
        blocks = blocks_for(holding.computed, self._cache.block_size)
        copied = blocks > 0 and self._costs.swap_pays(blocks, holding.computed) and self._make_host_room(blocks, but)
        if copied:
            holding.host_blocks.extend(self._host.take(blocks))
            holding.swapped = holding.computed
            plan.swap_out.extend(zip(holding.blocks[:blocks], holding.host_blocks, strict=True))
            self._arriving.add(holding)
        self._cache.release(holding.blocks)
        holding.computed = holding.listed = 0
        return copied

    def move_in(self, plan: Plan, holding: Holding, found: int) -> None:
        """Copy from the host what a holding has there behind its first ``found`` blocks; it has its blocks by now."""
        if holding.swapped > holding.computed:
            there = len(holding.host_blocks)
            plan.swap_in.extend(zip(holding.host_blocks[found:], holding.blocks[found:there], strict=True))
            holding.computed = holding.swapped
        self._leaving.extend(holding.host_blocks)
        holding.host_blocks.clear()
        holding.swapped = 0

    def forget_copies(self, copied: set[int]) -> None:
        """Drop what is on these host blocks."""
        for holding in [holding for holding in self._on_host if not copied.isdisjoint(holding.host_blocks)]:
            self.release(holding)

    def check(self, running: Iterable[Holding]) -> list[Holding]:
        """Assert that every holding in care is where it should be, and none of them runs; returns those in care."""
        assert all(holding.blocks and not holding.host_blocks for holding in self._in_blocks)
        assert all(holding.host_blocks and not holding.blocks for holding in self._on_host)
        assert not set(running) & (self._in_blocks.keys() | self._on_host.keys()), "who runs is in care too"
        return [*self._in_blocks, *self._on_host]

    def _make_host_room(self, blocks: int, but: Holding | None) -> bool:
        """See to it that so many host blocks are free, by dropping copies that were not used for longest."""
        if blocks > self._host.total:
            return False
        while self._host.free < blocks:
            oldest = next((holding for holding in self._on_host if holding is not but), None)
            if oldest is None or oldest in self._arriving:
                return False
            self.release(oldest)
        return True
