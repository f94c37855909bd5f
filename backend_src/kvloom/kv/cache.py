"""The device's block pool with its prefix cache: allocates, shares and evicts blocks. Plain Python, no tensors.

A block is in one of three states:

- used: it is in one or more block tables;
- cached: it is in no block table, but its content can still be found. The least recently used one is evicted first;
- free: it has no content.

A full block whose keys and values are computed gets *hashed*. Its key is the content id of the block before it and its
own token ids, and so it depends on the whole prefix. The first block's key has the sequence's namespace instead. Keys
are compared token by token, so a hash collision does no harm. vLLM's prefix cache works the same (Kwon et al., 2023).

In a block table no hashed block comes after one that is not hashed, and tables are released from the tail. So a block
is never evicted before the blocks that continue it, and every hashed block can be reached.
"""

import logging
import math
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from kvloom.kv.blocks import blocks_for
from kvloom.request import Sequence

log = logging.getLogger(__name__)

CHECKED_AT_ONCE = 1024
"""Blocks that a check covers between two pauses, which takes about a millisecond."""


class Key(NamedTuple):
    """The key of a hashed block.

    Attributes:
        parent: the content id of the block before it; the namespace for a first block.
        tokens: the block's token ids.
    """

    parent: int | str
    tokens: tuple[int, ...]


class Found(NamedTuple):
    """The result of looking up a prefix.

    Attributes:
        blocks: the hashed blocks found, in order.
        content_id: the content id of the last one; None if no block was found.
    """

    blocks: list[int]
    content_id: int | None


class _ConstantKey(Key):
    def __hash__(self) -> int:
        return 0


class _Mod7Key(Key):
    def __hash__(self) -> int:
        return super().__hash__() % 7


KEY_TYPES: dict[str, type[Key]] = {"": Key, "constant": _ConstantKey, "mod7": _Mod7Key}
"""Key types by hash function. Tests use the weak ones to show that collisions do no harm."""


@dataclass(slots=True)
class _Block:
    """One block.

    Attributes:
        tables: how many block tables contain it.
        key: the key it is hashed by; None if it is not hashed.
        content_id: a number that is never reused for other content.
        depth: the number of blocks before it in its sequence.
    """

    tables: int = 0
    key: Key | None = None
    content_id: int = 0
    depth: int = 0


class BlockCache:
    """Allocates, shares and evicts the blocks of the device's pool.

    Args:
        total: blocks in the pool.
        block_size: tokens per block.
        share: whether to hash full blocks, so that other sequences can share them.
        retain_limit: maximum number of blocks that can be retained.
        block_hash: one of ``KEY_TYPES``.
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
        self._key_type = KEY_TYPES[block_hash]
        self._blocks = [_Block() for _ in range(total)]
        # popped from the end: the memory of the most recently freed block is likely in a CPU cache
        self._free = list(range(total - 1, -1, -1))
        self._first_use = first_use
        self._unused = 0  # the first block that was never allocated
        self._hashed: dict[Key, int] = {}
        self._content_ids = 0
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
        """Number of retained blocks, used or cached."""
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
        """Look up a prefix like ``match``. The result can speed up the next call for the same sequence.

        Args:
            namespace: the sequence's namespace.
            tokens: the sequence's tokens.
            before: the result of an earlier call, for the same tokens or fewer of them. If its blocks are still hashed,
                only the blocks after them are looked up.
        """
        found: list[int] = []
        content_id: int | None = None
        if before is not None and before.content_id is not None:
            last = self._blocks[before.blocks[-1]]
            # If the last block is still hashed, so are all blocks before it
            if last.key is not None and last.content_id == before.content_id:
                found, content_id = list(before.blocks), before.content_id
        for index in range(len(found), (len(tokens) - 1) // self.block_size):
            block = self._hashed.get(self._key(namespace if content_id is None else content_id, tokens, index))
            if block is None:
                break
            found.append(block)
            content_id = self._blocks[block].content_id
        return Found(found, content_id)

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
            key = self._key_of(sequence, index)
            block = None if key is None else self._hashed.get(key)
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
            key = self._key_of(sequence, index)
            if key is None or key in self._hashed:
                # Another sequence computes the same block: `follow` shares it once a token after it is known
                return
            number = sequence.blocks[index]
            block = self._blocks[number]
            self._content_ids += 1
            block.key, block.content_id, block.depth = key, self._content_ids, index
            self._hashed[key] = number
            self._fresh.append(number)
            sequence.hashed += 1

    def drop_fresh(self) -> None:
        """Unhash the blocks that this step should have computed, because it failed."""
        for block in self._fresh:
            self._unhash(block)
        self._fresh.clear()

    def release(self, table: list[int]) -> None:
        """Empty ``table``. A block that is in no other table becomes cached or free. No other method does that."""
        for number in reversed(table):
            block = self._blocks[number]
            assert block.tables, "a block was released that is in no block table"
            block.tables -= 1
            if block.tables:
                continue
            if block.key is None:
                self._free.append(number)
            elif number in self._retained:
                self._kept.add(number)
            else:
                self._evictable[number] = None
        table.clear()

    def retain(self, blocks: list[int], until: float) -> None:
        """Do not evict these leading blocks of a table before ``until`` (``time.monotonic()``; infinite: pinned).

        If there are more than ``retain_limit`` allows, blocks retained for a shorter time lose their place. If that is
        not enough, the last of the new blocks are not retained. So a pinned block never loses its place.
        """
        hashed = [block for block in blocks if self._blocks[block].key is not None]
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
        count = len(self._hashed)
        self._free.extend(self._evictable)
        self._evictable.clear()
        for block in list(self._hashed.values()):
            self._unhash(block)
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
        content_ids: set[int] = set()
        for start in range(0, self.total, CHECKED_AT_ONCE):
            yield
            content_ids |= {block.content_id for block in self._part(start) if block.key is not None}
        for start in range(0, self.total, CHECKED_AT_ONCE):
            yield
            for number, block in enumerate(self._part(start), start):
                assert block.tables == uses[number], (
                    f"block {number} is in {uses[number]} block tables but counts {block.tables}"
                )
                assert (number in free) == (block.tables == 0 and block.key is None), (
                    f"block {number} is free but in use or hashed, or the reverse"
                )
                assert (number in evictable or number in kept) == (block.tables == 0 and block.key is not None)
                if block.key is not None:
                    assert self._hashed[block.key] == number, f"the key of block {number} finds another block"
                    assert isinstance(block.key.parent, str) or block.key.parent in content_ids, (
                        f"block {number} can't be reached"
                    )
        assert len(self._hashed) == len(content_ids), "two keys find the same block"

    def _part(self, start: int) -> list[_Block]:
        return self._blocks[start : start + CHECKED_AT_ONCE]

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._evictable)

    def _key(self, parent: int | str, tokens: list[int], index: int) -> Key:
        size = self.block_size
        return self._key_type(parent, tuple(tokens[index * size : (index + 1) * size]))

    def _key_of(self, sequence: Sequence, index: int) -> Key | None:
        """The key of a sequence's block; None if the block before it is not hashed."""
        if index == 0:
            return self._key(sequence.namespace, sequence.tokens, 0)
        parent = self._blocks[sequence.blocks[index - 1]]
        return None if parent.key is None else self._key(parent.content_id, sequence.tokens, index)

    def _use(self, number: int) -> None:
        self._evictable.pop(number, None)
        self._kept.discard(number)
        self._blocks[number].tables += 1

    def _take(self) -> int:
        """Allocate a block for one table: a free one, or else the least recently used evictable one."""
        if not self._free:
            oldest, _ = self._evictable.popitem(last=False)
            self._unhash(oldest)
            self._free.append(oldest)
        number = self._free.pop()
        self._blocks[number].tables = 1
        if number == self._unused:
            self._unused += 1
            if self._first_use is not None:
                self._first_use(number)
        return number

    def _unhash(self, number: int) -> None:
        block = self._blocks[number]
        assert block.key is not None
        del self._hashed[block.key]
        block.key = None

    def _by_expiry(self, blocks: Iterable[int]) -> list[int]:
        """Sort blocks by the order of eviction: the earliest expiry first, then the tail of a sequence first."""
        return sorted(blocks, key=lambda number: (self._retained[number], -self._blocks[number].depth))

    def _stop_retaining(self, blocks: Iterable[int]) -> None:
        for number in self._by_expiry(blocks):
            del self._retained[number]
            if number in self._kept:
                self._kept.remove(number)
                self._evictable[number] = None
        self._next_expiry = min(self._retained.values(), default=math.inf)
