"""Chooses how many programs share a sequence's keys. It does not import triton, since the planner uses it."""

PROGRAMS_PER_MULTIPROCESSOR = 4
LEAST_TOKENS = 256
"""The least tokens per split. With fewer tokens, writing and joining the parts costs more than it gains."""
MAX_TOKENS = 4096
"""The most tokens per split, so that a long sequence among short ones does not become one slow program."""
MAX_PROGRAMS_PER_MULTIPROCESSOR = 64
"""The most programs that ``MAX_TOKENS`` may cause. If most sequences are short, most programs are empty but take time.
"""
MAX_SPLITS = 128


def split_count(batch: int, kv_heads: int, max_length: int, multiprocessors: int) -> int:
    """The number of splits of each sequence's keys, a power of two.

    There should be enough programs for the whole GPU and no slow long split, but no split that is too short to pay. The
    result depends only on ``max_length`` rounded up to a power of two, so that it is constant within a CUDA graph.
    """
    length = _power_of_2(max_length)
    pairs = batch * kv_heads
    busy = PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // pairs
    short = min(length // MAX_TOKENS, MAX_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors // pairs)
    return max(1, min(_power_of_2(max(busy, short)), length // LEAST_TOKENS, MAX_SPLITS))


def _power_of_2(number: int) -> int:
    """The smallest power of two that is at least ``number`` and 1."""
    return 1 << (max(number, 1) - 1).bit_length()
