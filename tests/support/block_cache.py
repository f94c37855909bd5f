"""Block caches without a model: sequences that compute tokens and release their blocks."""

from kvloom.kv.cache import BlockCache
from kvloom.request import Request, SamplingParams, Sequence
from support.block_rig import BLOCK

A, B, C, D = ([letter] * BLOCK for letter in range(4))


def cache_of(blocks: int = 10, **settings: object) -> BlockCache:
    return BlockCache(blocks, BLOCK, **settings)


def compute(cache: BlockCache, tokens: list[int], salt: str = "") -> Sequence:
    """A sequence whose known tokens are all computed: it shares the blocks that are found and computes the rest."""
    request = Request(id="", prompt_ids=tuple(tokens), params=SamplingParams(), arrival=0.0, cache_salt=salt)
    sequence = Sequence(request)
    found = cache.match(salt, tokens)
    assert cache.open(sequence.blocks, found, len(tokens))
    sequence.hashed = len(found)
    cache.hash_computed(sequence, len(tokens))
    sequence.computed = len(tokens)
    return sequence


def put(cache: BlockCache, tokens: list[int], salt: str = "") -> list[int]:
    """Compute tokens and release their blocks. Returns the blocks."""
    sequence = compute(cache, tokens, salt)
    return let_go(cache, sequence)


def let_go(cache: BlockCache, sequence: Sequence) -> list[int]:
    blocks = list(sequence.blocks)
    cache.release(sequence.blocks)
    return blocks


def put_retained(cache: BlockCache, tokens: list[int], until: float) -> list[int]:
    sequence = compute(cache, tokens)
    cache.retain(sequence.blocks[: sequence.hashed], until)
    return let_go(cache, sequence)


def hits(cache: BlockCache, tokens: list[int], salt: str = "") -> int:
    """How many blocks of ``tokens`` are found if one more token follows."""
    return len(cache.match(salt, [*tokens, 99]))


def take(cache: BlockCache, count: int) -> list[int]:
    table: list[int] = []
    assert cache.extend(table, count * BLOCK)
    return table
