"""Edits of single scores of all kinds, in one launch."""

import torch
import triton
import triton.language as tl

from kvloom.ops.penalties import Edits

_BLOCK = 256
_LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _rounded(x):
    """Round to fp32. It saturates, because infinity would ban a token or become NaN later."""
    return tl.minimum(tl.maximum(x, -_LARGEST), _LARGEST).to(tl.float32).to(tl.float64)


@triton.jit
def _edit(scores, index, bias, repetition, subtracted, banned, saved, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + entry, mask=entry < count, other=-1)
    used = place >= 0
    old = tl.load(scores + place, mask=used, other=0.0)
    tl.store(saved + entry, old, mask=used)
    x = _rounded(old.to(tl.float64) + tl.load(bias + entry, mask=used, other=0.0))
    penalty = tl.load(repetition + entry, mask=used, other=1.0)
    x = _rounded(tl.where(x > 0, x / penalty, x * penalty))
    x = _rounded(x - tl.load(subtracted + entry, mask=used, other=0.0))
    gone = tl.load(banned + entry, mask=used, other=0) != 0
    tl.store(scores + place, tl.where(gone, float("-inf"), x.to(tl.float32)), mask=used)


@triton.jit
def _restore(scores, index, saved, count, BLOCK: tl.constexpr):
    entry = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    place = tl.load(index + entry, mask=entry < count, other=-1)
    tl.store(scores + place, tl.load(saved + entry, mask=place >= 0), mask=place >= 0)


def edit(scores: torch.Tensor, edits: Edits) -> torch.Tensor:
    """See ``kvloom.ops.penalties.edit``."""
    assert scores.is_contiguous()
    count = len(edits.index)
    saved = torch.empty(count, dtype=scores.dtype, device=scores.device)
    if count:
        _edit[(triton.cdiv(count, _BLOCK),)](
            scores,
            edits.index,
            edits.bias,
            edits.repetition,
            edits.subtracted,
            edits.banned.view(torch.int8),
            saved,
            count,
            BLOCK=_BLOCK,
            num_warps=4,
        )
    return saved


def restore(scores: torch.Tensor, edits: Edits, saved: torch.Tensor) -> None:
    """See ``kvloom.ops.penalties.restore``."""
    assert scores.is_contiguous()
    if len(saved):
        _restore[(triton.cdiv(len(saved), _BLOCK),)](scores, edits.index, saved, len(saved), BLOCK=_BLOCK, num_warps=4)
