"""What the attention kernels share: softmax in powers of two, the tiles that a window leaves, sizes of the machine."""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)

ASSUMED_MULTIPROCESSORS = 132
"""Of an H100 or H200; for tensors that are on no GPU, whose kernels are interpreted or only compiled."""

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many multiprocessors (compute units) the device has."""
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture() -> int | str | None:
    """What kernels are compiled for: 90 for Hopper, "gfx942" and the like for AMD; None where they are interpreted."""
    if triton.knobs.runtime.interpret:
        return None
    return triton.runtime.driver.active.get_current_target().arch


def score_factors(scale: float, soft_cap: float) -> tuple[float, float]:
    """``inner`` and ``outer`` of ``scores_of``: what scores are multiplied by, so that softmax is a power of two."""
    if soft_cap:
        return scale / soft_cap * 2 * LOG2_E, soft_cap * LOG2_E
    return scale * LOG2_E, 1.0


@triton.jit
def scores_of(products, inner, outer, CAPPED: tl.constexpr):
    """Scores times log2(e) from the products of queries and keys."""
    scores = products * inner
    if CAPPED:
        # tanh(x) = 1 - 2 / (exp(2 x) + 1), whose limits are right where the power overflows
        scores = outer * (1.0 - 2.0 / (tl.exp2(scores) + 1.0))
    return scores


@triton.jit
def tiles_seen(first, last, window, sinks, TILE: tl.constexpr, WINDOWED: tl.constexpr):
    """Which tiles of keys the queries at positions first..last see: how many, how many of them hold only sinks or come
    before the window's first tile, and that first tile.
    """
    tiles = tl.cdiv(last + 1, TILE)
    sink_tiles = 0
    window_tile = 0
    if WINDOWED:
        window_tile = tl.maximum(first - window + 1, 0) // TILE
        sink_tiles = tl.minimum(tl.cdiv(sinks, TILE), window_tile)
        tiles = tiles - window_tile + sink_tiles
    return tiles, sink_tiles, window_tile


@triton.jit
def tile_at(step, sink_tiles, window_tile, WINDOWED: tl.constexpr):
    """The tile of the n-th step over the tiles of ``tiles_seen``."""
    tile = step
    if WINDOWED:
        tile = tl.where(step < sink_tiles, step, step - sink_tiles + window_tile)
    return tile


@triton.jit
def load_rows(cache, at, inside, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Keys or values [rows, WIDTH] that begin at ``at``.

    Rows that are not ``inside`` are not read: another sequence may have left anything there, and NaN times 0 is NaN.
    Masks that do nothing are left out, since they take registers and instructions.
    """
    column = tl.arange(0, WIDTH)
    pointers = cache + at[:, None] + column[None, :]
    if HEAD_DIM == WIDTH and MASKED:
        rows = tl.load(pointers, mask=inside[:, None], other=0.0)
    elif HEAD_DIM == WIDTH:
        rows = tl.load(pointers)
    elif MASKED:
        rows = tl.load(pointers, mask=inside[:, None] & (column < HEAD_DIM)[None, :], other=0.0)
    else:
        rows = tl.load(pointers, mask=(column < HEAD_DIM)[None, :], other=0.0)
    return rows
