"""The ops' fused Triton kernels: what they run as where their tensors are on a GPU.

An op asks ``runs_triton`` and only then imports its kernel, so that a server without a GPU never imports triton.
"""

import torch

_everywhere = False


def use_triton_everywhere(on: bool) -> None:
    """Let the ops launch their Triton kernels for tensors on the CPU too.

    For tests alone: under triton's interpreter, or to compile exactly what would be launched.
    """
    global _everywhere
    _everywhere = on


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an op with this tensor runs as a Triton kernel."""
    return tensor.is_cuda or _everywhere
