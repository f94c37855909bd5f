"""Residual add and RMS normalization in one pass over each row."""

import torch
import triton
import triton.language as tl


@triton.jit
def _add_rms_norm(
    residual, update, weight, rows, normed, total, eps, WIDTH: tl.constexpr, BLOCK: tl.constexpr, GATHER: tl.constexpr
):
    target = tl.program_id(0).to(tl.int64)
    source = tl.load(rows + target) if GATHER else target
    columns = tl.arange(0, BLOCK)
    inside = columns < WIDTH
    x = tl.load(residual + source * WIDTH + columns, mask=inside, other=0.0)
    if update is not None:
        x += tl.load(update + source * WIDTH + columns, mask=inside, other=0.0).to(tl.float32)
        tl.store(total + target * WIDTH + columns, x, mask=inside)
    scale = tl.rsqrt(tl.sum(x * x, 0) / WIDTH + eps)
    y = x * scale * tl.load(weight + columns, mask=inside, other=0.0).to(tl.float32)
    tl.store(normed + target * WIDTH + columns, y.to(normed.dtype.element_ty), mask=inside)


def add_rms_norm(
    residual: torch.Tensor, update: torch.Tensor | None, weight: torch.Tensor, eps: float, rows: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kvloom.ops.norm.add_rms_norm``. There is one program per row, which keeps the row in registers."""
    assert residual.is_contiguous() and (update is None or update.is_contiguous())
    width = residual.shape[1]
    count = residual.shape[0] if rows is None else rows.shape[0]
    normed = torch.empty(count, width, dtype=weight.dtype, device=residual.device)
    if update is None:
        total = residual if rows is None else residual[rows]
    else:
        total = torch.empty(count, width, dtype=residual.dtype, device=residual.device)
    block = triton.next_power_of_2(width)
    if count:
        _add_rms_norm[(count,)](
            residual,
            update,
            weight,
            rows,
            normed,
            total,
            eps,
            WIDTH=width,
            BLOCK=block,
            GATHER=rows is not None,
            # 8 numbers per thread: two 128-bit loads of the residual, and enough warps to hide their latency
            num_warps=min(max(block // 256, 1), 16),
        )
    return normed, total
