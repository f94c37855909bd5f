"""Gated activations."""

import torch
import triton
import triton.language as tl

_BLOCK = 1024


@triton.jit
def _silu_mul(gate_up, out, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < width
    gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
    y = gate / (1 + tl.exp(-gate)) * up
    tl.store(out + row * width + columns, y.to(out.dtype.element_ty), mask=inside)


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See ``kvloom.ops.activation.silu_mul``. Computed in fp32 and rounded once."""
    assert gate_up.is_contiguous()
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(rows, width, dtype=gate_up.dtype, device=gate_up.device)
    if rows:
        _silu_mul[(rows, triton.cdiv(width, _BLOCK))](gate_up, out, width, BLOCK=_BLOCK, num_warps=2)
    return out
