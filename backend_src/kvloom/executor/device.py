"""One device as the current one, and waiting for it."""

from contextlib import AbstractContextManager, nullcontext

import torch


def wait_for(device: torch.device) -> None:
    """Wait until everything that was launched on the device is done; on the CPU everything always is."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a GPU the current one of this thread: where kernels are launched and streams are looked up."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()
