"""Selects a GPU and waits for it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def wait_for(device: torch.device) -> None:
    """Wait until all work launched on the device is done. On the CPU nothing is ever pending."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Make a GPU this thread's current one, on which kernels are launched and streams are looked up."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
