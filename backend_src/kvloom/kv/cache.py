"""The device's blocks: who uses them, and which of them hold a prefix that others may use. Plain Python, no tensors.

A block is in one of three states:

- used: in one or more block tables;
- cached: in none, but its content can still be found; the least recently used one is reclaimed first;
- free: its content means nothing.

A full block whose tokens have their keys and values computed is *hashed*: found by (content id of the block before it,
its token ids), so by everything that comes before it, and compared token by token: the hash of a dict decides nothing.
The chain starts at a sequence's namespace. This is the prefix cache of vLLM (Kwon et al., 2023) with blocks as unit.

A table never holds a hashed block after one that is not hashed, and tables are released from their tail. So a block is
never reclaimed before those that continue it, and whatever is hashed can be reached.
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
"""Blocks that a check looks at between two pauses: about a millisecond."""


class Key(NamedTuple):
    """What a hashed block is found by.

    Attributes:
        parent: the content id it continues, or the namespace it starts.
        tokens: its token ids.
    """

    parent: int | str
    tokens: tuple[int, ...]


class Found(NamedTuple):
    """The hashed blocks that some tokens begin with.

    Attributes:
        blocks: in the order of the tokens.
        content_id: of the last one; None where there is none.
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
"""Keys by how they are hashed; the weak ones are for tests, which show that a collision harms nobody."""


@dataclass(slots=True)
class _Block:
    """One block.

    Attributes:
        tables: how many block tables it is in.
        key: what it is hashed by; None: it is not hashed.
        content_id: a number, never used again for another one.
        depth: blocks before it in its chain.
    """

    tables: int = 0
    key: Key | None = None
    content_id: int = 0
    depth: int = 0


class BlockCache:
    """Hands out, shares and reclaims the blocks of the device's pool.

    Args:
        total: blocks in the pool.
        block_size: tokens per block.
        share: hash full blocks, so that later sequences find them; False: every block is private.
        retain_limit: maximum number of blocks that can be retained.
        block_hash: one of ``KEY_TYPES``.
        first_use: is told of each block that is handed out for the first time; they come in order.
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
        # popped from the end: the most recently freed block first, whose memory is warm
        self._free = list(range(total - 1, -1, -1))
        self._first_use = first_use
        self._unused = 0  # the first block that was never handed out
        self._hashed: dict[Key, int] = {}
        self._content_ids = 0
        # what was hashed since the step began: its content is not computed yet
        self._fresh: list[int] = []
        # cached blocks that may be reclaimed, the next one first
        self._evictable: OrderedDict[int, None] = OrderedDict()
        # until when (time.monotonic()) a hashed block is not reclaimed; a block's is never later than its parent's
        self._retained: dict[int, float] = {}
        self._next_expiry = math.inf
        # cached blocks that may not be reclaimed
        self._kept: set[int] = set()

    @property
    def free(self) -> int:
        """Number of blocks whose content means nothing."""
        return len(self._free)

    @property
    def cached(self) -> int:
        """Number of blocks that are in no table, but whose content can be found."""
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
        """Begin a step: what was hashed so far is computed, and what was retained until ``now`` may be reclaimed."""
        self._fresh.clear()
        if now >= self._next_expiry:
            self._stop_retaining([block for block, until in self._retained.items() if until <= now])

    def match(self, namespace: str, tokens: list[int]) -> list[int]:
        """The hashed blocks that ``tokens`` begins with, the last token left out: it is always computed."""
        return self.find(namespace, tokens).blocks

    def find(self, namespace: str, tokens: list[int], before: Found | None = None) -> Found:
        """As ``match``, for who may have to ask again.

        Args:
            namespace: of the sequence.
            tokens: of the sequence.
            before: what was found for it earlier, of these tokens or the first of them: only what follows is looked up,
                unless some of it is gone.
        """
        found: list[int] = []
        content_id: int | None = None
        if before is not None and before.content_id is not None:
            last = self._blocks[before.blocks[-1]]
            # a block is hashed no longer than those before it
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
        """Fill an empty ``table`` with blocks for ``tokens`` tokens, the first of them those that ``match`` found.

        Returns:
            False, with nothing changed, unless ``spare`` blocks could still be handed out afterwards.
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
        """Append blocks to ``table`` until it holds ``tokens`` tokens.

        Returns:
            False, with nothing changed, unless ``spare`` blocks could still be handed out afterwards.
        """
        missing = blocks_for(tokens, self.block_size) - len(table)
        if missing + spare > self._available:
            return False
        table.extend(self._take() for _ in range(missing))
        return True

    def follow(self, sequence: Sequence) -> int:
        """Put hashed blocks into a sequence's table in place of its own: what others computed is not computed again.

        Returns:
            The number of tokens that need no computing any more.
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
                # the same tokens, computed elsewhere: `follow` takes them over once a token after them is known
                return
            number = sequence.blocks[index]
            block = self._blocks[number]
            self._content_ids += 1
            block.key, block.content_id, block.depth = key, self._content_ids, index
            self._hashed[key] = number
            self._fresh.append(number)
            sequence.hashed += 1

    def drop_fresh(self) -> None:
        """Unhash what this step was to compute, because it failed."""
        for block in self._fresh:
            self._unhash(block)
        self._fresh.clear()

    def release(self, table: list[int]) -> None:
        """Take every block of ``table`` out of it: the one place where a block stops being used."""
        for number in reversed(table):
            block = self._blocks[number]
            assert block.tables, "a block was released that nobody uses"
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
        """Do not reclaim these leading blocks of a table before ``until`` (``time.monotonic()``; infinite: pinned).

        Where that is more than ``retain_limit`` allows, those whose time ends earlier make room, and the last of these
        blocks are not retained if there are too few of them. So nobody takes a pinned block's place.
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
        """Number of blocks that are retained for ever."""
        return sum(until == math.inf for until in self._retained.values())

    def pinned_of(self, namespace: str, tokens: list[int]) -> int:
        """Number of blocks that ``tokens`` begins with and that are retained for ever."""
        found = self.match(namespace, [*tokens, 0])
        return sum(self._retained.get(block) == math.inf for block in found)

    def stop_retaining(self) -> bool:
        """Let all retained blocks be reclaimed; whether there were any."""
        any_retained = bool(self._retained)
        self._stop_retaining(list(self._retained))
        return any_retained

    def flush(self) -> int:
        """Forget every content id, also of blocks in use; returns how many there were."""
        self.stop_retaining()
        count = len(self._hashed)
        self._free.extend(self._evictable)
        self._evictable.clear()
        for block in list(self._hashed.values()):
            self._unhash(block)
        return count

    def check(self, tables: Iterable[list[int]]) -> None:
        """Assert that every block is in one state, and that ``tables`` and the content ids agree with it."""
        for _ in self.check_in_parts(tables):
            pass

    def check_in_parts(self, tables: Iterable[list[int]]) -> Iterator[None]:
        """As ``check``, with a pause after each few blocks; it says nothing if a block changes in a pause."""
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
                    f"block {number} counts {block.tables} tables, is in {uses[number]}"
                )
                assert (number in free) == (block.tables == 0 and block.key is None), f"block {number}: free or not?"
                assert (number in evictable or number in kept) == (block.tables == 0 and block.key is not None)
                if block.key is not None:
                    assert self._hashed[block.key] == number, f"block {number} is not what its content id finds"
                    assert isinstance(block.key.parent, str) or block.key.parent in content_ids, (
                        f"block {number} can't be reached"
                    )
        assert len(self._hashed) == len(content_ids), "two content ids of one block"

    def _part(self, start: int) -> list[_Block]:
        return self._blocks[start : start + CHECKED_AT_ONCE]

    @property
    def _available(self) -> int:
        return len(self._free) + len(self._evictable)

    def _key(self, parent: int | str, tokens: list[int], index: int) -> Key:
        size = self.block_size
        return self._key_type(parent, tuple(tokens[index * size : (index + 1) * size]))

    def _key_of(self, sequence: Sequence, index: int) -> Key | None:
        """The key of a sequence's block; None where the block before it is not hashed any more."""
        if index == 0:
            return self._key(sequence.namespace, sequence.tokens, 0)
        parent = self._blocks[sequence.blocks[index - 1]]
        return None if parent.key is None else self._key(parent.content_id, sequence.tokens, index)

    def _use(self, number: int) -> None:
        self._evictable.pop(number, None)
        self._kept.discard(number)
        self._blocks[number].tables += 1

    def _take(self) -> int:
        """A block for one table: a free one, else the cached one that was not used for longest."""
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
        """In the order in which they may be reclaimed: whose time ends first, and a chain from its end."""
        return sorted(blocks, key=lambda number: (self._retained[number], -self._blocks[number].depth))

    def _stop_retaining(self, blocks: Iterable[int]) -> None:
        for number in self._by_expiry(blocks):
            del self._retained[number]
            if number in self._kept:
                self._kept.remove(number)
                self._evictable[number] = None
        self._next_expiry = min(self._retained.values(), default=math.inf)
