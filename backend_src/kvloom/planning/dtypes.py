"""What the settings ``weights`` and ``kv_dtype`` stand for on this machine, the device being chosen."""

import torch

from kvloom.config import Settings
from kvloom.kv.codec import PlainCodec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of activations and of plain weights."""

CODECS = {name: PlainCodec(dtype) for name, dtype in DTYPES.items()}
"""Dtypes of the cache, each with how it stores a block."""


def weights_name(settings: Settings) -> str:
    """What the weights are: a name in ``DTYPES``, or int8, int4 or w8a8."""
    return _native_name(settings) if settings.weights == "auto" else settings.weights


def activations_name(settings: Settings) -> str:
    """Name in ``DTYPES`` of the dtype of activations: that of plain weights, else the machine's own."""
    name = weights_name(settings)
    return name if name in DTYPES else _native_name(settings)


def _native_name(settings: Settings) -> str:
    if settings.device.startswith("cuda"):
        return "bf16"
    # oneDNN also emulates bf16 on older CPUs, slower than fp32: ask for the instructions, not for support
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def cache_name(settings: Settings) -> str:
    """Name in ``CODECS`` of the cache's dtype."""
    return activations_name(settings) if settings.kv_dtype == "auto" else settings.kv_dtype
