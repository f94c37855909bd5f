"""Gated activations."""

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's activation (Shazeer, 2020): silu(gate) * up. ``gate_up`` is [T, 2 * intermediate], the gate first."""
    if runs_triton(gate_up):
        from kvloom.ops.gpu.activation import silu_mul as fused

        return fused(gate_up)
    lib = library(gate_up)
    if lib is not None:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = empty(rows, width, dtype=gate_up.dtype)
        lib.kvloom_silu_mul(gate_up.data_ptr(), gate_up.dtype is torch.bfloat16, rows, width, out.data_ptr())
        return out
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
