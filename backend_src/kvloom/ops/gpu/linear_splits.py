"""Chooses how many programs share a sum of a quantized product. It does not import triton, as the planner uses it."""

COLUMNS = 128
"""out_features per program."""

MAX_ROWS = 64
"""The most rows per program. More rows take more programs, and then sums are not split."""

_LEAST_SHARE = 4
"""The least blocks per split, as many as are loaded ahead."""

_PROGRAMS = 2
"""With this many programs per multiprocessor the loads in flight use the full memory bandwidth."""


def split_count(out_features: int, blocks: int, multiprocessors: int) -> int:
    """The number of programs that share a column's sum. It depends on the weight's shape and the GPU, not on rows."""
    columns = -(-out_features // COLUMNS)
    split = 1
    while columns * split < multiprocessors * _PROGRAMS and blocks >= 2 * split * _LEAST_SHARE:
        split *= 2
    return split


def max_parts_bytes(multiprocessors: int) -> int:
    """The most bytes of any product's parts: fp32 sums of fewer than twice the desired number of programs."""
    return 2 * multiprocessors * _PROGRAMS * COLUMNS * MAX_ROWS * 4
