"""How many programs share the sum of a product with quantized weights. Without triton, since the planner asks too."""

COLUMNS = 128
"""out_features of a program."""

MAX_ROWS = 64
"""Rows of a program at most. More rows are as many programs, whose sums are not divided."""

_LEAST_SHARE = 4
"""Blocks below which a sum is not divided any further: so many are loaded ahead."""

_PROGRAMS = 2
"""Programs per multiprocessor whose loads in flight are enough for all of the bandwidth."""


def split_count(out_features: int, blocks: int, multiprocessors: int) -> int:
    """Programs that share a column's sum: of the weight's shape and the GPU alone, so that few rows don't change it."""
    columns = -(-out_features // COLUMNS)
    split = 1
    while columns * split < multiprocessors * _PROGRAMS and blocks >= 2 * split * _LEAST_SHARE:
        split *= 2
    return split


def max_parts_bytes(multiprocessors: int) -> int:
    """Bytes of a product's parts at most, whatever its shape: fp32, of fewer than twice the programs asked for."""
    return 2 * multiprocessors * _PROGRAMS * COLUMNS * MAX_ROWS * 4
