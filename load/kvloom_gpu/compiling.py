"""Compiles exactly the kernels that the ops launch, without a GPU."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from triton.backends.compiler import GPUTarget
from triton.runtime.driver import driver
from triton.runtime.jit import KernelInterface

TARGETS = {
    "sm_80": GPUTarget("cuda", 80, 32),
    "sm_90": GPUTarget("cuda", 90, 32),
    "sm_100": GPUTarget("cuda", 100, 32),
    "gfx942": GPUTarget("hip", "gfx942", 64),
}
"""The targets: A100; H100 and H200; B200; MI300."""


class _NoDevice:
    """Replaces triton's driver: has a target but no device."""

    def __init__(self, target: GPUTarget):
        self._target = target

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> tuple[str, int | str]:
        # triton keeps one compiler per device id, so each target has its own device id
        return self._target.backend, self._target.arch

    def get_current_stream(self, device: object) -> int:
        return 0

    def get_active_torch_device(self) -> torch.device:
        return torch.device("cpu")


class _NothingEmpty(TorchFunctionMode):
    """Let new tensors contain zeros."""

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        return result.zero_() if function.__name__ in ("empty", "empty_like", "new_empty") else result


def compiled(target: GPUTarget, work: Callable[[], object]) -> list[tuple[str, Any]]:
    """Run ``work`` with every launch of a Triton kernel compiled for ``target`` instead.

    Nothing is computed: tensors that a launch would write keep their values, and new tensors are 0, so that torch can
    use them. The arguments are those of the ops, including dtypes, divisibility of strides and alignment of pointers.

    Args:
        target: one of ``TARGETS``.
        work: calls ops with tensors on the CPU; ``use_triton_everywhere`` must be on.

    Returns:
        Name and triton's ``CompiledKernel`` of every launch, in order.
    """
    kernels: list[tuple[str, Any]] = []

    def compile_instead(self: Any, grid: object) -> Callable[..., Any]:
        def launch(*args: object, **options: object) -> Any:
            kernel = self.warmup(*args, grid=grid, **options)
            kernels.append((self.__name__, kernel))
            return kernel

        return launch

    with _active(_NoDevice(target)), _replaced(KernelInterface, "__getitem__", compile_instead), _NothingEmpty():
        work()
    return kernels


@contextmanager
def _active(stub: _NoDevice) -> Iterator[None]:
    before = driver._active
    driver.set_active(stub)
    try:
        yield
    finally:
        driver._active = before


@contextmanager
def _replaced(owner: type, name: str, value: object) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
