"""RoPE and the cache write in Triton against float64."""

import math
from unittest.mock import patch

import numpy as np
import pytest
import torch

from kvloom.ops.kv_write import rope_kv_write
from support.paged_batch import full_of_nan

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kv_dtype", TOLERANCE)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"), [(9, 3, 64, 16), (6, 2, 80, 8), (4, 4, 20, 16), (1, 1, 128, 32)]
)
def test_rope_kv_write(dtype, kv_dtype, heads, kv_heads, head_dim, block_size):
    slots = torch.tensor([3, 9, -1, 11, 0, 5 * block_size - 1, 2 * block_size, -1])
    tokens = len(slots)
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    positions = torch.tensor([0, 5, 0, 7, 3, 100, 31, 0])
    frequency = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(128), frequency)
    cos_sin = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], 1)).float()
    memory = torch.full((6, 3, 2, kv_heads, block_size, head_dim), math.nan).to(kv_dtype)
    k_cache, v_cache = memory[:, 1, 0], memory[:, 1, 1]
    with patch("kvloom.ops.kv_write.empty", full_of_nan):
        out = rope_kv_write(qkv, cos_sin, positions, slots, k_cache, v_cache)

    x = qkv.double().view(tokens, -1, head_dim).numpy()
    # the pair (i, i + half) is a complex number that turns by position * frequency
    pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
    turned = pairs * np.exp(1j * np.outer(positions.numpy(), frequency))[:, None]
    rotated = torch.from_numpy(np.concatenate([turned.real, turned.imag], -1))
    scale = rotated.abs().max().item()
    assert (out.double() - rotated[:, :heads]).abs().max() <= TOLERANCE[dtype] * scale
    expected = torch.full(memory.shape, math.nan, dtype=torch.float64)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected[slot // block_size, 1, 0, :, slot % block_size] = rotated[token, heads : heads + kv_heads]
            expected[slot // block_size, 1, 1, :, slot % block_size] = torch.from_numpy(x)[token, heads + kv_heads :]
    assert torch.equal(memory.isnan(), expected.isnan()), "written where nothing belongs, or not where it does"
    error = (memory.double() - expected).nan_to_num().abs().max()
    assert error <= TOLERANCE[kv_dtype] * scale
    values = memory[:, 1, 1].nan_to_num()
    assert torch.equal(values, expected[:, 1, 1].nan_to_num().to(kv_dtype)), "values are copied, not computed"
