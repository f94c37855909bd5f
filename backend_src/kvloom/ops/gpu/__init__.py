"""The Triton kernels of the ops, for tensors on a GPU.

An op imports its kernel only if ``runs_triton`` is true, so that a server without a GPU never imports triton.
"""

import torch

_everywhere = False


def use_triton_everywhere(on: bool) -> None:
    """Let the ops launch their Triton kernels for tensors on the CPU, too.

    Only tests and the kernel audit need this: they run kernels in triton's interpreter, or only compile them.
    """
    global _everywhere
    _everywhere = on


def runs_triton(tensor: torch.Tensor) -> bool:
    """Whether an op with this tensor runs as a Triton kernel."""
    return tensor.is_cuda or _everywhere
