"""Attention over the paged cache."""

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    *,
    max_queries: int,
    max_length: int,
) -> torch.Tensor:
    """Causal attention of a flat batch of prefill chunks and decodes, each over its own blocks.

    The queries of sequence b belong to the last of its ``seq_lens[b]`` tokens. All keys and values are already in the
    cache. A sequence of length 0 is padding, and the result of its queries is 0. On a CPU each sequence is computed
    alone and in fp32, so that an answer does not depend on other sequences.

    Args:
        q: [T, heads, head_dim].
        k_cache: [blocks, kv_heads, block_size, head_dim], any float dtype.
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M]. Entries after a sequence's last block are not read.
        query_starts: int32 [B + 1], where each sequence begins in T.
        seq_lens: int32 [B], each sequence's length including this step's tokens.
        scale: factor on the scores.
        max_queries: the most queries of one sequence, or more. It is an argument so that no launch waits for the GPU.
        max_length: the longest sequence, or more. It decides how work is divided but does not change the result.

    Returns:
        [T, heads, head_dim] in q's dtype.
    """
    out = empty(*q.shape, dtype=q.dtype, device=q.device)
    if runs_triton(q):
        from kvloom.ops.gpu.attention import attend

        attend(
            q,
            k_cache,
            v_cache,
            block_tables,
            query_starts,
            seq_lens,
            scale,
            out,
            max_queries=max_queries,
            max_length=max_length,
        )
        return out
    if _native(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out):
        return out
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    starts = query_starts.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        start, end = starts[b], starts[b + 1]
        count = end - start
        if not count:
            continue
        if not length:
            out[start:end] = 0
            continue
        blocks = block_tables[b, : -(-length // block_size)]
        k, v = (
            cache.index_select(0, blocks).transpose(0, 1).reshape(kv_heads, -1, head_dim)[:, :length].float()
            for cache in (k_cache, v_cache)
        )
        # [kv_heads, count * group, head_dim]: queries that share a KV head are rows of one product
        rows = q[start:end].view(count, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows.float() * scale, k.transpose(1, 2))
        if count > 1:
            keys = torch.arange(length, device=q.device)
            positions = torch.arange(length - count, length, device=q.device).repeat_interleave(group)[:, None]
            scores.masked_fill_(keys > positions, float("-inf"))
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
    out: torch.Tensor,
) -> bool:
    """Compute the same in C++. Returns False if that is not possible."""
    lib = library(q, k_cache, v_cache)
    if lib is None:
        return False
    assert q.is_contiguous() and k_cache.stride() == v_cache.stride() and k_cache[0].is_contiguous()
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
    return not failed


def attention_bytes(
    tokens: int, length: int, heads: int, kv_heads: int, head_dim: int, itemsize: int, kv_itemsize: int
) -> int:
    """Bytes that ``paged_attention`` in torch needs at its peak, without its queries.

    Args:
        tokens: queries of one sequence.
        length: tokens of that sequence.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        itemsize: bytes of a number in the queries and in the result.
        kv_itemsize: bytes of a number in the cache.
    """
    # keys and values in fp32, and one of them in the cache's dtype, gathered and then reordered
    gathered = kv_heads * length * head_dim * (2 * 4 + 2 * kv_itemsize)
    # scores and their softmax in fp32, and the mask, which all KV heads share
    scores = tokens * length * (2 * 4 * heads + heads // kv_heads)
    # the result, the queries in fp32, the scaled queries, and the result in fp32
    rows = tokens * heads * head_dim * (itemsize + 3 * 4)
    return gathered + scores + rows
