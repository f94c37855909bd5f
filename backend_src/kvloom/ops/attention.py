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
    window: int = 0,
    sinks: int = 0,
    soft_cap: float = 0.0,
    mass: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
) -> torch.Tensor:
    """Causal attention of a flat batch of prefill chunks and decodes, each against its own blocks.

    The queries of sequence b are the last ones of its ``seq_lens[b]`` tokens, whose keys and values are all in the
    cache already. A sequence of length 0 is padding: its queries give zeros. On a CPU sequences are computed one by one
    and in fp32, so that an answer does not depend on its neighbours.

    Args:
        q: [T, heads, head_dim].
        k_cache: [blocks, kv_heads, block_size, head_dim], any float dtype.
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M]; entries past a sequence's length are not read.
        query_starts: int32 [B + 1], offsets into T.
        seq_lens: int32 [B], this step's tokens included.
        scale: factor on the scores.
        max_queries: at least the most queries of one sequence; known here so that no kernel launch waits for the GPU.
        max_length: at least the longest sequence; it chooses how the work is divided, not what is computed.
        window: where it is not 0, query i sees the keys j with j < sinks or i - window < j <= i (Xiao et al., 2023).
        sinks: first tokens that a window never hides.
        soft_cap: where it is not 0, scores s become soft_cap * tanh(s / soft_cap) (Gemma 2, 2024).
        mass: fp32 [B, kv_heads, M], overwritten: the probability that each page got, summed over the sequence's queries
            of this step and the heads of the group; 0 for pages that no query sees (what H2O accumulates).
        out: where to put the result, contiguous.
        workspace: fp32, what the GPU's kernels pass on, for callers that allocate nothing in a step: at least
            ``ops.gpu.decode_attention.decode_workspace`` numbers.

    Returns:
        [T, heads, head_dim] in q's dtype.
    """
    out = empty(*q.shape, dtype=q.dtype, device=q.device) if out is None else out
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
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
            mass=mass,
            workspace=workspace,
        )
        return out
    plain = not window and not soft_cap and mass is None
    if plain and _native(q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out):
        return out
    kv_heads, block_size, head_dim = k_cache.shape[1:]
    group = q.shape[1] // kv_heads
    if mass is not None:
        mass.zero_()
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
        # [kv_heads, count * group, head_dim]: the queries that share a KV head are rows of one product
        rows = q[start:end].view(count, kv_heads, group, head_dim).transpose(0, 1).reshape(kv_heads, -1, head_dim)
        scores = torch.matmul(rows.float() * scale, k.transpose(1, 2))
        if soft_cap:
            scores = torch.tanh(scores / soft_cap) * soft_cap
        if count > 1 or window:
            keys = torch.arange(length, device=q.device)
            positions = torch.arange(length - count, length, device=q.device).repeat_interleave(group)[:, None]
            hidden = keys > positions
            if window:
                hidden |= (keys >= sinks) & (keys <= positions - window)
            scores.masked_fill_(hidden, float("-inf"))
        shares = scores.softmax(-1)
        mixed = torch.matmul(shares, v)
        out[start:end] = mixed.view(kv_heads, count, group, head_dim).transpose(0, 1).reshape(count, -1, head_dim)
        if mass is not None:
            pages = torch.nn.functional.pad(shares.sum(1), (0, len(blocks) * block_size - length))
            mass[b, :, : len(blocks)] = pages.view(kv_heads, -1, block_size).sum(-1)
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
    """The same in C++; False where that can't be."""
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
