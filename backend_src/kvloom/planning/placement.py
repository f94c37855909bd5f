"""Chooses the model's device and measures its free memory."""

from dataclasses import dataclass
from importlib.util import find_spec

import torch

from kvloom.config import Settings
from kvloom.errors import SettingsError
from kvloom.planning.memory import free_memory

OLDEST_GPU = (8, 0)
"""The lowest supported compute capability, the A100's: it has bf16 matrix instructions and asynchronous copies."""


@dataclass(frozen=True, slots=True)
class Free:
    """Memory that this process can take, in bytes.

    Attributes:
        device: memory for the weights, the cache and a step's tensors.
        host: host memory for swapped blocks; None if it is the same memory.
    """

    device: int
    host: int | None = None


def with_device(settings: Settings) -> Settings:
    """Resolve the setting ``device`` to ``cpu`` or ``cuda:N``.

    Raises:
        SettingsError: the GPU can't be used. The message says why and what to do.
    """
    name = settings.device
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    if name != "cpu":
        _check_gpu(name)
        if settings.weights == "w8a8":
            raise SettingsError(
                "setting weights='w8a8': INT8 activations run on the CPU only; set weights=int8 or weights=int4, whose "
                "activations are bf16, or device=cpu"
            )
    return settings.model_copy(update={"device": name})


def free_on(device: torch.device) -> Free:
    """The free memory for a model on ``device``."""
    if device.type == "cpu":
        return Free(free_memory())
    return Free(torch.cuda.mem_get_info(device)[0], free_memory())


def _check_gpu(name: str) -> None:
    if not torch.cuda.is_available():
        build = "has no CUDA" if torch.version.cuda is None and torch.version.hip is None else "sees no GPU"
        raise SettingsError(
            f"setting device={name!r}: this torch ({torch.__version__}) {build}; install a CUDA build of torch and the "
            "GPU's driver (in a container: --gpus all), or set device=cpu"
        )
    count, index = torch.cuda.device_count(), int(name.removeprefix("cuda:"))
    if index >= count:
        raise SettingsError(f"setting device={name!r}: there is no such GPU; choose from cuda:0 to cuda:{count - 1}")
    capability = torch.cuda.get_device_capability(index)
    if torch.version.hip is None and capability < OLDEST_GPU:
        raise SettingsError(
            f"setting device={name!r}: {torch.cuda.get_device_name(index)} has compute capability "
            f"{capability[0]}.{capability[1]}; the kernels need {OLDEST_GPU[0]}.{OLDEST_GPU[1]} (A100) or newer; "
            "set device=cpu"
        )
    if find_spec("triton") is None:
        raise SettingsError(
            f"setting device={name!r}: the kernels need the package triton; install it, or set device=cpu"
        )
