"""What the settings ``weights`` and ``kv_dtype`` stand for on this machine, the device being chosen."""

import torch

from kvloom.config import Settings
from kvloom.kv.codec import PlainCodec

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
"""Dtypes of weights and activations."""

CODECS = {name: PlainCodec(dtype) for name, dtype in DTYPES.items()}
"""Dtypes of the cache, each with how it stores a block."""


def weights_name(settings: Settings) -> str:
    """Name in ``DTYPES`` of the dtype of weights and activations."""
    if settings.weights != "auto":
        return settings.weights
    if settings.device.startswith("cuda"):
        return "bf16"
    # oneDNN also emulates bf16 on older CPUs, slower than fp32: ask for the instructions, not for support
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if native else "fp32"


def cache_name(settings: Settings) -> str:
    """Name in ``CODECS`` of the cache's dtype."""
    return weights_name(settings) if settings.kv_dtype == "auto" else settings.kv_dtype
