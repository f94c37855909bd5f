"""RoPE and the cache write of new keys and values, in one pass over the projections."""

import torch
import triton
import triton.language as tl

HEADS_EACH = 8
"""Heads per program. Fewer heads make programs with too little work, more make too few programs in a decode."""


@triton.jit
def _store_halves(cache, at, low, first, second, HALF: tl.constexpr, FORMAT: tl.constexpr, mask):
    """Store numbers in the cache's format. Only this function knows formats. ``plain`` is the cache's dtype."""
    tl.static_assert(FORMAT == "plain")
    tl.store(cache + at + low, first.to(cache.dtype.element_ty), mask=mask)
    tl.store(cache + at + HALF + low, second.to(cache.dtype.element_ty), mask=mask)


@triton.jit
def _rope_kv_write(
    qkv,
    cos_sin,
    positions,
    slots,
    k_cache,
    v_cache,
    queries,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    HALF: tl.constexpr,
    HALF_WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    HEADS_EACH: tl.constexpr,
    FORMAT: tl.constexpr,
):
    token = tl.program_id(0)
    head = (tl.program_id(1) * HEADS_EACH + tl.arange(0, HEADS_EACH))[:, None]
    low = tl.arange(0, HALF_WIDTH)[None, :]
    in_half = low < HALF
    HEAD_DIM: tl.constexpr = 2 * HALF
    ALL: tl.constexpr = HEADS + 2 * KV_HEADS
    read = (head < ALL) & in_half
    at = token.to(tl.int64) * (ALL * HEAD_DIM) + head * HEAD_DIM + low
    first = tl.load(qkv + at, mask=read, other=0.0).to(tl.float32)
    second = tl.load(qkv + at + HALF, mask=read, other=0.0).to(tl.float32)

    angle = tl.load(positions + token) * HEAD_DIM + low
    cos = tl.load(cos_sin + angle, mask=in_half, other=1.0)
    sin = tl.load(cos_sin + angle + HALF, mask=in_half, other=0.0)
    turned_first = first * cos - second * sin
    turned_second = second * cos + first * sin

    of_queries = (head < HEADS) & in_half
    to = token.to(tl.int64) * (HEADS * HEAD_DIM) + head * HEAD_DIM + low
    tl.store(queries + to, turned_first.to(queries.dtype.element_ty), mask=of_queries)
    tl.store(queries + to + HALF, turned_second.to(queries.dtype.element_ty), mask=of_queries)

    slot = tl.load(slots + token)
    # Padding has slot -1
    kept = (slot >= 0) & in_half
    place = slot // BLOCK_SIZE * BLOCK_STRIDE + slot % BLOCK_SIZE * TOKEN_STRIDE
    of_keys = kept & (head >= HEADS) & (head < HEADS + KV_HEADS)
    key = place + (head - HEADS) * HEAD_STRIDE
    _store_halves(k_cache, key, low, turned_first, turned_second, HALF, FORMAT, of_keys)
    of_values = kept & (head >= HEADS + KV_HEADS) & (head < ALL)
    value = place + (head - HEADS - KV_HEADS) * HEAD_STRIDE
    _store_halves(v_cache, value, low, first, second, HALF, FORMAT, of_values)


def rope_kv_write(
    qkv: torch.Tensor,
    cos_sin: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    queries: torch.Tensor,
) -> None:
    """``ops.kv_write.rope_kv_write`` on a GPU.

    Args:
        qkv: [T, (heads + 2 * kv_heads) * head_dim]; for the other arguments, too, see there.
        cos_sin: fp32 [positions, head_dim].
        positions: int64 [T].
        slots: int64 [T].
        k_cache: [blocks, kv_heads, block_size, head_dim], written.
        v_cache: like ``k_cache``, written.
        queries: [T, heads, head_dim], written.
    """
    assert qkv.is_contiguous() and cos_sin.is_contiguous() and queries.is_contiguous()
    assert k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    tokens, heads, head_dim = queries.shape
    kv_heads, block_size = k_cache.shape[1:3]
    if not tokens:
        return
    half = head_dim // 2
    half_width = triton.next_power_of_2(half)
    _rope_kv_write[tokens, triton.cdiv(heads + 2 * kv_heads, HEADS_EACH)](
        qkv,
        cos_sin,
        positions,
        slots,
        k_cache,
        v_cache,
        queries,
        HEADS=heads,
        KV_HEADS=kv_heads,
        HALF=half,
        HALF_WIDTH=half_width,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        HEADS_EACH=HEADS_EACH,
        FORMAT="plain",
        # 8 numbers per thread, which are 128 bits in bf16
        num_warps=max(1, half_width * HEADS_EACH // 256),
    )
