"""The device's block pool: allocates, shares, retains and evicts blocks. Plain Python, no tensors.

A block is in one of three states:

- used: it is in one or more block tables;
- cached: it is in no block table, but it is hashed (see ``PrefixIndex``). The least recently used one is evicted first;
- free: it has no content.

In a block table no hashed block comes after one that is not hashed, and tables are released from the tail. So a block
is never evicted before the blocks that continue it, and every hashed block can be reached.
"""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator

from kvloom.kv.blocks import blocks_for
from kvloom.kv.prefix_index import CHECKED_AT_ONCE, Found, PrefixIndex
from kvloom.request import Sequence

log = logging.getLogger(__name__)


class BlockCache:
    """Allocates, shares and evicts the blocks of the device's pool.

    Args:
        total: blocks in the pool.
        block_size: tokens per block.
        share: whether to hash full blocks, so that other sequences can share them.
        retain_limit: maximum number of blocks that can be retained.
        block_hash: one of ``prefix_index.KEY_TYPES``.
        first_use: called with each block that is allocated for the first time. These blocks come in order.
    """

    def __init__(
        self,
        total: int,
        block_size: int,
        share: bool = True,
        retain_limit: int = 0,
        block_hash: str = "",
        first_use: Callable[[int], None] | None = None,
    ):
        self.total = total
        self.block_size = block_size
        self.retain_limit = retain_limit
        self.shares = share
        self._index = PrefixIndex(total, block_size, block_hash)
        # how many block tables contain each block
        self._tables = [0] * total
        # popped from the end: the memory of the most recently freed block is likely in a CPU cache
        self._free = list(range(total - 1, -1, -1))
        self._first_use = first_use
        self._unused = 0  # the first block that was never allocated
        # blocks hashed since the step began: this step computes their content
        self._fresh: list[int] = []
        # cached blocks that may be evicted, in the order of eviction
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # when each retained block may be evicted (time.monotonic()), never later than the block before it
        self._retained: dict[int, float] = {}
        self._next_expiry = math.inf
        # cached blocks that are retained, so they may not be evicted
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that are in no block table but can still be found."""
        return len(self._evictable) + len(self._kept)

    @property
    def used(self) -> int:
        """Number of blocks in block tables."""
        return self.total - self.free - self.cached

    @property
    def retained(self) -> int:
        """Number of retained blocks, used or cached. Tests read this."""
        return len(self._retained)

    def begin(self, now: float) -> None:
        """Begin a step: all hashed blocks count as computed, and blocks retained until ``now`` may be evicted."""
        self._fresh.clear()
        if now >= self._next_expiry:
            self._stop_retaining([block for block, until in self._retained.items() if until <= now])

    def match(self, namespace: str, tokens: list[int]) -> list[int]:
        """The hashed blocks of the longest prefix of ``tokens``. The last token never counts: it must be computed."""
        return self.find(namespace, tokens).blocks

    def find(self, namespace: str, tokens: list[int], before: Found | None = None) -> Found:
        """See ``PrefixIndex.find``."""
        return self._index.find(namespace, tokens, before)

    def open(self, table: list[int], found: list[int], tokens: int, spare: int = 0) -> bool:
        """Fill an empty ``table`` with blocks for ``tokens`` tokens. It begins with the blocks that ``match`` found.

        Returns:
            False, with nothing changed, if fewer than ``spare`` blocks would be available afterwards.
        """
        missing = blocks_for(tokens, self.block_size) - len(found)
        if missing + spare > self._available - sum(block in self._evictable for block in found):
            return False
        for block in found:
            self._use(block)
        table.extend(found)
        table.extend(self._take() for _ in range(missing))
        return True

    def extend(self, table: list[int], tokens: int, spare: int = 0) -> bool:
        """Append blocks to ``table`` until it has room for ``tokens`` tokens.

        Returns:
            False, with nothing changed, if fewer than ``spare`` blocks would be available afterwards.
        """
        missing = blocks_for(tokens, self.block_size) - len(table)
        if missing + spare > self._available:
            return False
        table.extend(self._take() for _ in range(missing))
        return True

    def follow(self, sequence: Sequence) -> int:
        """Replace a sequence's own blocks by equal blocks that other sequences have computed.

        Returns:
            The number of tokens that the sequence need not compute itself.
        """
        before = sequence.computed
        while (index := sequence.hashed) < (len(sequence.tokens) - 1) // self.block_size:
            key = self._index.key_of(sequence, index)
            block = None if key is None else self._index.get(key)
            if block is None:
                break
            own = [sequence.blocks[index]]
            self._use(block)
            sequence.blocks[index] = block
            self.release(own)
            sequence.hashed += 1
            sequence.computed = max(sequence.computed, sequence.hashed * self.block_size)
        return sequence.computed - before

    def hash_computed(self, sequence: Sequence, end: int) -> None:
        """Hash a sequence's full blocks before token ``end``, whose keys and values this step computes."""
        if not self.shares:
            return
        while (index := sequence.hashed) < end // self.block_size:
            key = self._index.key_of(sequence, index)
            if key is None or self._index.get(key) is not None:
                # Another sequence computes the same block: `follow` shares it once a token after it is known
                return
            block = sequence.blocks[index]
            self._index.add(block, key, depth=index)
            self._fresh.append(block)
            sequence.hashed += 1

    def drop_fresh(self) -> None:
        """Unhash the blocks that this step should have computed, because it failed."""
        for block in self._fresh:
            self._index.remove(block)
        self._fresh.clear()

    def release(self, table: list[int]) -> None:
        """Empty ``table``. A block that is in no other table becomes cached or free. No other method does that."""
        for block in reversed(table):
            assert self._tables[block], "a block was released that is in no block table"
            self._tables[block] -= 1
            if self._tables[block]:
                continue
            if block not in self._index:
                self._free.append(block)
            elif block in self._retained:
                self._kept.add(block)
            else:
                self._evictable[block] = None
        table.clear()

    def retain(self, blocks: list[int], until: float) -> None:
        """Do not evict these leading blocks of a table before ``until`` (``time.monotonic()``; infinite: pinned).

        If there are more than ``retain_limit`` allows, blocks retained for a shorter time lose their place. If that is
        not enough, the last of the new blocks are not retained. So a pinned block never loses its place.
        """
        hashed = [block for block in blocks if block in self._index]
        before = [block for block in hashed if block in self._retained]
        for block in before:
            self._retained[block] = max(until, self._retained[block])
        new = hashed[len(before) :]
        surplus = len(self._retained) + len(new) - self.retain_limit
        if surplus > 0:
            log.warning("retain_memory is full: %d blocks are not retained", surplus)
            earlier = [block for block, ends in self._retained.items() if ends < until]
            make_room = self._by_expiry(earlier)[:surplus]
            self._stop_retaining(make_room)
            new = new[: len(new) - (surplus - len(make_room))]
        self._retained.update(dict.fromkeys(new, until))
        self._next_expiry = min(self._retained.values(), default=math.inf)

    def pinned(self) -> int:
        """Number of pinned blocks, which are retained for ever."""
        return sum(until == math.inf for until in self._retained.values())

    def pinned_of(self, namespace: str, tokens: list[int]) -> int:
        """Number of pinned blocks in the longest hashed prefix of ``tokens``."""
        found = self.match(namespace, [*tokens, 0])
        return sum(self._retained.get(block) == math.inf for block in found)

    def stop_retaining(self) -> bool:
        """Allow all retained blocks to be evicted. Returns whether there were any."""
        any_retained = bool(self._retained)
        self._stop_retaining(list(self._retained))
        return any_retained

    def flush(self) -> int:
        """Unhash every block, including blocks in use. Returns how many there were."""
        self.stop_retaining()
        count = len(self._index)
        self._free.extend(self._evictable)
        self._evictable.clear()
        self._index.clear()
        return count

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert that every block is in one state, and that ``tables`` and the content ids agree with it.

        Only tests call this; the engine calls ``check_in_parts``.
        """
        for _ in self.check_in_parts(tables):
            pass

    def check_in_parts(self, tables: Iterable[list[int]]) -> Iterator[None]:
        """Like ``check``, but yields after every few blocks. If a block changes in a pause, the check is void."""
        uses = Counter(block for table in tables for block in table)
        evictable, kept, free = set(self._evictable), self._kept, set(self._free)
        assert self.free + self.cached + self.used == self.total, "free + cached + used is not the total"
        assert len(free) == len(self._free), "a block is free twice"
        assert not (free & evictable or free & kept or evictable & kept), "a block is in two states"
        assert kept <= self._retained.keys(), "a block is kept without being retained"
        for start in range(0, self.total, CHECKED_AT_ONCE):
            yield
            for block in range(start, min(start + CHECKED_AT_ONCE, self.total)):
                count, hashed = self._tables[block], block in self._index
                assert count == uses[block], f"block {block} is in {uses[block]} block tables but counts {count}"
                assert (block in free) == (not count and not hashed), (
                    f"block {block} is free but in use or hashed, or the reverse"
                )
                assert (block in evictable or block in kept) == (not count and hashed), (
                    f"block {block} is cached but in use or not hashed, or the reverse"
                )
        yield from self._index.check_in_parts()

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._evictable)

    def _use(self, number: int) -> None:
        self._evictable.pop(number, None)
        self._kept.discard(number)
        self._tables[number] += 1

    def _take(self) -> int:
        """Allocate a block for one table: a free one, or else the least recently used evictable one."""
        if not self._free:
            oldest, _ = self._evictable.popitem(last=False)
            self._index.remove(oldest)
            self._free.append(oldest)
        number = self._free.pop()
        self._tables[number] = 1
        if number == self._unused:
            self._unused += 1
            if self._first_use is not None:
                self._first_use(number)
        return number

    def _by_expiry(self, blocks: Iterable[int]) -> list[int]:
        """Sort blocks by the order of eviction: the earliest expiry first, then the tail of a sequence first."""
        return sorted(blocks, key=lambda number: (self._retained[number], -self._index.depth(number)))

    def _stop_retaining(self, blocks: Iterable[int]) -> None:
        for number in self._by_expiry(blocks):
            del self._retained[number]
            if number in self._kept:
                self._kept.remove(number)
                self._evictable[number] = None
        self._next_expiry = min(self._retained.values(), default=math.inf)
