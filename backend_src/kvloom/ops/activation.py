"""Gated activations."""

import torch


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """SwiGLU's gate (Shazeer, 2020): silu(gate) * up, for gate_up = [T, 2 * intermediate], gate first."""
    gate, up = gate_up.chunk(2, -1)
    return torch.nn.functional.silu(gate) * up
