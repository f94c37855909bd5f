"""Code that the attention kernels share: loading keys and values, dtypes, properties of the GPU."""

import math
from functools import lru_cache

import torch
import triton
import triton.language as tl

LOG2_E = math.log2(math.e)
"""The kernels multiply scores by it, because powers of two are faster than powers of e."""

ASSUMED_MULTIPROCESSORS = 132
"""The number of an H100 or H200, for tensors that are not on a GPU: then kernels are interpreted or only compiled."""

TYPES = {torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """The number of multiprocessors (compute units) of a device."""
    if device.type != "cuda":
        return ASSUMED_MULTIPROCESSORS
    return torch.cuda.get_device_properties(device).multi_processor_count


def architecture() -> int | str | None:
    """The target of compilation: 90 for Hopper, or a name like "gfx942" for AMD; None if kernels are interpreted."""
    if triton.knobs.runtime.interpret:
        return None
    return triton.runtime.driver.active.get_current_target().arch


@triton.jit
def load_rows(cache, at, inside, HEAD_DIM: tl.constexpr, WIDTH: tl.constexpr, MASKED: tl.constexpr):
    """Load keys or values [rows, WIDTH] that begin at ``at``.

    Rows that are not ``inside`` are not read. They may hold NaN from another sequence, and NaN times 0 is NaN. Masks
    without effect are left out, since they cost registers and instructions.
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
