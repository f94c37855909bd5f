"""Resolves the settings ``weights`` and ``kv_dtype`` on this machine. The device must be chosen before."""

import torch

from kvloom.config import Settings
from kvloom.kv.codec import PlainCodec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of activations and of plain weights."""

CODECS = {name: PlainCodec(dtype) for name, dtype in DTYPES.items()}
"""The cache's dtypes, each with the codec of its blocks."""


def weights_name(settings: Settings) -> str:
    """The form of the weights: a name in ``DTYPES``, or int8, int4 or w8a8."""
    return _native_name(settings) if settings.weights == "auto" else settings.weights


def activations_name(settings: Settings) -> str:
    """Name in ``DTYPES`` of the activations' dtype: that of the weights if they are plain, or else the native one."""
    name = weights_name(settings)
    return name if name in DTYPES else _native_name(settings)


def _native_name(settings: Settings) -> str:
    if settings.device.startswith("cuda"):
        return "bf16"
    # oneDNN emulates bf16 on older CPUs, slower than fp32. So ask for the instructions instead of for support
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def cache_name(settings: Settings) -> str:
    """Name of the cache's dtype in ``CODECS``."""
    return activations_name(settings) if settings.kv_dtype == "auto" else settings.kv_dtype
