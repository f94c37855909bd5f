"""Residual add and RMS normalization."""

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library


def add_rms_norm(
    residual: torch.Tensor,
    update: torch.Tensor | None,
    weight: torch.Tensor,
    eps: float,
    rows: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add a layer's output to the residual stream and normalize the sum (Zhang and Sennrich, 2019).

    Args:
        residual: fp32 [T, hidden].
        update: [T, hidden] of any float dtype; None if there is nothing to add.
        weight: [hidden]. The normalized result has its dtype.
        eps: added to the mean of squares.
        rows: int64 [R], the rows to compute, such as those with logits in a model's last layer; None for all.

    Returns:
        The normalized result [T, hidden] in weight's dtype, and the new residual fp32 [T, hidden]. With ``rows`` they
        have R rows.
    """
    if runs_triton(residual):
        from kvloom.ops.gpu.norm import add_rms_norm as fused

        return fused(residual, update, weight, eps, rows)
    lib = library(residual, weight) if update is None else library(residual, weight, update)
    if lib is not None:
        count, width = residual.shape[0] if rows is None else rows.shape[0], residual.shape[1]
        total, normed = empty(count, width, dtype=residual.dtype), empty(count, width, dtype=weight.dtype)
        lib.kvloom_add_rms_norm(
            residual.data_ptr(),
            None if update is None else update.data_ptr(),
            update is not None and update.dtype is torch.bfloat16,
            weight.data_ptr(),
            weight.dtype is torch.bfloat16,
            eps,
            None if rows is None else rows.data_ptr(),
            count,
            width,
            total.data_ptr(),
            normed.data_ptr(),
        )
        return normed, total
    if rows is not None:
        residual, update = residual[rows], None if update is None else update[rows]
    if update is not None:
        residual = residual + update
    normed = torch.nn.functional.rms_norm(residual, weight.shape, weight.float(), eps)
    return normed.to(weight.dtype), residual
