"""Attention over the paged cache."""

import torch

from kvloom.ops.native import library


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Causal attention of a flat batch of prefill chunks and decodes, each against its own blocks.

    The queries of sequence b are the last ones of its ``seq_lens[b]`` tokens, whose keys and values are all in the
    cache already. Sequences are computed one by one and in fp32, so that an answer does not depend on its neighbours.

    Args:
        q: [T, heads, head_dim].
        k_cache: [blocks, kv_heads, block_size, head_dim], any float dtype.
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M]; entries past a sequence's length are not read.
        query_starts: int32 [B + 1], offsets into T.
        seq_lens: int32 [B], this step's tokens included.
        scale: factor on the scores.

    Returns:
        [T, heads, head_dim] in q's dtype.
    """
    done = _native(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale)
    if done is not None:
        return done
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    out = torch.empty_like(q)
    starts = query_starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        start, end = starts[b], starts[b + 1]
        count = end - start
        if not count:
            continue
        blocks = block_tables[b, : -(-length // block_size)]
        k, v = (
            cache.index_select(0, blocks).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
            for cache in (k_cache, v_cache)
        )
        # [kv_heads, count * group, head_dim]: the queries that share a KV head are rows of one product
        rows = q[start:end].view(count, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows.float() * scale, k.transpose(1, 2))
        if count > 1:
            positions = torch.arange(length - count, length, device=q.device).repeat_interleave(group)
            future = torch.arange(length, device=q.device) > positions[:, None]
            scores.masked_fill_(future, float("-inf"))
        mixed = torch.matmul(scores.softmax(-1), v)
        out[start:end] = mixed.view(kv_heads, count, group, head_dim).transpose(0, 1).reshape(count, -1, head_dim)
    return out


def _native(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
) -> torch.Tensor | None:
    """The same in C++; None where that can't be."""
    lib = library(q, k_cache, v_cache)
    if lib is None:
        return None
    assert q.is_contiguous() and k_cache.stride() == v_cache.stride() and k_cache[0].is_contiguous()
    out = torch.empty_like(q)
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    failed = lib.kvloom_paged_attention(
        q.data_ptr(),
        q.dtype is torch.bfloat16,
        k_cache.data_ptr(),
        v_cache.data_ptr(),
        k_cache.dtype is torch.bfloat16,
        block_tables.data_ptr(),
        block_tables.stride(0),
        query_starts.data_ptr(),
        seq_lens.data_ptr(),
        len(seq_lens),
        q.shape[1],
        kv_heads,
        head_dim,
        block_size,
        k_cache.stride(0),
        scale,
        out.data_ptr(),
    )
    return None if failed else out


def attention_bytes(
    tokens: int, length: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kv_itemsize: int
) -> int:
    """Bytes that ``paged_attention`` holds at its peak, its queries aside.

    Args:
        tokens: queries of one sequence.
        length: tokens of that sequence.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        itemsize: bytes of a number in the queries and in the result.
        kv_itemsize: bytes of a number in the cache.
    """
    # keys and values in fp32, and the values on their way there: gathered, then put in order
    gathered = kv_heads * length * head_dim * (2 * 4 + 2 * kv_itemsize)
    # scores and their softmax in fp32, and the mask, which is one for all KV heads
    scores = tokens * length * (2 * 4 * heads + heads // kv_heads)
    # the result; queries in fp32, scaled, and what becomes the result
    rows = tokens * heads * head_dim * (itemsize + 3 * 4)
    return gathered + scores + rows
