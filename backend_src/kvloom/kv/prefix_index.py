"""The index of the prefix cache: finds blocks by the tokens in them and before them. Plain Python, no tensors.

A full block whose keys and values are computed gets *hashed*. Its key is the content id of the block before it and its
own token ids, and so it depends on the whole prefix. The first block's key has the sequence's namespace instead. Keys
are compared token by token, so a hash collision does no harm. vLLM's prefix cache works the same (Kwon et al., 2023).
"""

from collections.abc import Iterator
from typing import NamedTuple

from kvloom.request import Sequence

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


class _Entry(NamedTuple):
    """A hashed block.

    Attributes:
        key: its key.
        content_id: a number that is never reused for other content.
        depth: the number of blocks before it in its sequence.
    """

    key: Key
    content_id: int
    depth: int


class PrefixIndex:
    """Finds the hashed blocks of a pool. Membership and length are those of hashed blocks.

    Args:
        total: blocks in the pool.
        block_size: tokens per block.
        block_hash: one of ``KEY_TYPES``.
    """

    def __init__(self, total: int, block_size: int, block_hash: str):
        self._block_size = block_size
        self._key_type = KEY_TYPES[block_hash]
        self._entries: list[_Entry | None] = [None] * total
        self._blocks: dict[Key, int] = {}
        self._content_ids = 0

    def __len__(self) -> int:
        return len(self._blocks)

    def __contains__(self, block: int) -> bool:
        return self._entries[block] is not None

    def depth(self, block: int) -> int:
        """The number of blocks before a hashed block in its sequence."""
        return self._entry(block).depth

    def find(self, namespace: str, tokens: list[int], before: Found | None = None) -> Found:
        """Look up the longest prefix of ``tokens``. The last token never counts: it must be computed.

        Args:
            namespace: the sequence's namespace.
            tokens: the sequence's tokens.
            before: the result of an earlier call, for the same tokens or fewer of them. If its blocks are still hashed,
                only the blocks after them are looked up.
        """
        found: list[int] = []
        content_id: int | None = None
        if before is not None and before.content_id is not None:
            last = self._entries[before.blocks[-1]]
            # If the last block is still hashed, so are all blocks before it
            if last is not None and last.content_id == before.content_id:
                found, content_id = list(before.blocks), before.content_id
        for index in range(len(found), (len(tokens) - 1) // self._block_size):
            block = self._blocks.get(self._key(namespace if content_id is None else content_id, tokens, index))
            if block is None:
                break
            found.append(block)
            content_id = self._entry(block).content_id
        return Found(found, content_id)

    def key_of(self, sequence: Sequence, index: int) -> Key | None:
        """The key of a sequence's block; None if the block before it is not hashed."""
        if index == 0:
            return self._key(sequence.namespace, sequence.tokens, 0)
        parent = self._entries[sequence.blocks[index - 1]]
        return None if parent is None else self._key(parent.content_id, sequence.tokens, index)

    def get(self, key: Key) -> int | None:
        """The block with this key; None if there is none."""
        return self._blocks.get(key)

    def add(self, block: int, key: Key, depth: int) -> None:
        """Hash a block by a key that no other block has."""
        assert block not in self and key not in self._blocks
        self._content_ids += 1
        self._entries[block] = _Entry(key, self._content_ids, depth)
        self._blocks[key] = block

    def remove(self, block: int) -> None:
        """Unhash a block."""
        del self._blocks[self._entry(block).key]
        self._entries[block] = None

    def clear(self) -> None:
        """Unhash every block."""
        for block in list(self._blocks.values()):
            self.remove(block)

    def check_in_parts(self) -> Iterator[None]:
        """Assert that every hashed block can be found. Yields like ``BlockCache.check_in_parts``."""
        content_ids: set[int] = set()
        for start in range(0, len(self._entries), CHECKED_AT_ONCE):
            yield
            content_ids |= {entry.content_id for entry in self._part(start) if entry is not None}
        for start in range(0, len(self._entries), CHECKED_AT_ONCE):
            yield
            for number, entry in enumerate(self._part(start), start):
                if entry is not None:
                    assert self._blocks[entry.key] == number, f"the key of block {number} finds another block"
                    assert isinstance(entry.key.parent, str) or entry.key.parent in content_ids, (
                        f"block {number} can't be reached"
                    )
        assert len(self._blocks) == len(content_ids), "a key finds a block that is not hashed by it"

    def _part(self, start: int) -> list[_Entry | None]:
        return self._entries[start : start + CHECKED_AT_ONCE]

    def _key(self, parent: int | str, tokens: list[int], index: int) -> Key:
        size = self._block_size
        return self._key_type(parent, tuple(tokens[index * size : (index + 1) * size]))

    def _entry(self, block: int) -> _Entry:
        entry = self._entries[block]
        assert entry is not None, "the block is not hashed"
        return entry
