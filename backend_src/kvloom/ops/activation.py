"""Gated activations."""

from ctypes import c_int64

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import address, library


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer, 2020): silu(gate) * up, for gate_up = [T, 2 * intermediate], gate first."""
    if runs_triton(gate_up):
        from kvloom.ops.gpu.activation import silu_mul as fused

        return fused(gate_up)
    lib = library(gate_up)
    if lib is not None:
        rows, width = gate_up.shape[0], gate_up.shape[1] // 2
        out = torch.empty(rows, width, dtype=gate_up.dtype)
        is_bf16 = gate_up.dtype is torch.bfloat16
        lib.kvloom_silu_mul(address(gate_up), is_bf16, c_int64(rows), c_int64(width), address(out))
        return out
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
