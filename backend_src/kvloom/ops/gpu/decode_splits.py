"""How many programs share the keys of a sequence. Without triton, since the planner asks too."""

PROGRAMS_PER_MULTIPROCESSOR = 4
LEAST_TOKENS = 256
"""Of a split: with fewer, writing and joining the parts costs more than it gains."""
MAX_TOKENS = 4096
"""Of a split: a longest sequence among short ones is then no program that the others wait for."""
MAX_PROGRAMS_PER_MULTIPROCESSOR = 64
"""A limit to ``MAX_TOKENS``: where most sequences are short, most programs find nothing to do, and that takes time."""
MAX_SPLITS = 128


def split_count(batch: int, kv_heads: int, max_length: int, multiprocessors: int) -> int:
    """Parts that the keys of each sequence are divided into: a power of two.

    Enough programs for the whole machine, and no part so long that all wait for it, but none that is too short to pay.
    It depends on the lengths by a power of two of the longest alone, so that it is constant within a CUDA graph.
    """
    length = _power_of_2(max_length)
    pairs = batch * kv_heads
    busy = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // pairs
    short = min(length // MAX_TOKENS, MAX_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // pairs)
    return max(1, min(_power_of_2(max(busy, short)), length // LEAST_TOKENS, MAX_SPLITS))


def _power_of_2(number: int) -> int:
    """The next one from ``number`` on; 1 at least."""
    return 1 << (max(number, 1) - 1).bit_length()
