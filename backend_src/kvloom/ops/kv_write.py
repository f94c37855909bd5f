"""Rotary position embedding, and writing new keys and values to the paged cache."""

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library


def rope_kv_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
) -> torch.Tensor:
    """Rotate queries and keys, write keys and values to their slots, return the queries.

    RoPE (Su et al., 2021) in the half-split form of Llama checkpoints: dimensions i and i + head_dim / 2 are a pair.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim], queries, keys and values of each token side by side.
        cos_sin: fp32 [positions, head_dim], cosines then sines of the head_dim / 2 frequencies.
        positions: int64 [T], absolute.
        slots: int64 [T], the slot mapping: block id * block_size + offset; -1 for padding, which is not written.
        k_cache: [blocks, kv_heads, block_size, head_dim], written in place.
        v_cache: like ``k_cache``.

    Returns:
        Rotated queries [T, heads, head_dim] in qkv's dtype.
    """
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    tokens = qkv.shape[0]
    heads = qkv.shape[1] // head_dim - 2 * kv_heads
    queries = empty(tokens, heads, head_dim, dtype=qkv.dtype, device=qkv.device)
    if runs_triton(qkv):
        from kvloom.ops.gpu import kv_write

        kv_write.rope_kv_write(qkv, cos_sin, positions, slots, k_cache, v_cache, queries)
        return queries
    lib = library(qkv, k_cache, v_cache)
    if lib is not None:
        lib.kvloom_rope_kv_write(
            qkv.data_ptr(),
            qkv.dtype is torch.bfloat16,
            cos_sin.data_ptr(),
            positions.data_ptr(),
            slots.data_ptr(),
            k_cache.data_ptr(),
            v_cache.data_ptr(),
            k_cache.dtype is torch.bfloat16,
            tokens,
            heads,
            kv_heads,
            head_dim,
            block_size,
            k_cache.stride(0),
            queries.data_ptr(),
        )
        return queries
    half = head_dim // 2
    qkv = qkv.view(tokens, -1, head_dim)
    cos, sin = cos_sin[positions][:, None].split(half, -1)
    first, second = qkv[:, : heads + kv_heads].float().split(half, -1)
    rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), -1)
    kept = slots >= 0
    block, offset = slots[kept] // block_size, slots[kept] % block_size
    k_cache[block, :, offset] = rotated[kept, heads:].to(k_cache.dtype)
    v_cache[block, :, offset] = qkv[kept, heads + kv_heads :].to(v_cache.dtype)
    return queries.copy_(rotated[:, :heads])
