"""Which attention kernels a batch needs."""

import torch

from kvloom.ops.gpu.decode_attention import decode_attention
from kvloom.ops.gpu.prefill_attention import prefill_attention


def attend(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    max_queries: int,
    max_length: int,
    window: int,
    sinks: int,
    soft_cap: float,
    mass: torch.Tensor | None,
    workspace: torch.Tensor | None,
) -> None:
    """``paged_attention`` on a GPU: chunks and decodes of a mixed batch each by their own kernel.

    Each kernel passes over the sequences that the other computes, which only the GPU can tell apart.
    """
    assert q.is_contiguous() and out.is_contiguous() and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    assert block_tables.stride(1) == 1 and query_starts.is_contiguous() and seq_lens.is_contiguous()
    assert mass is None or (mass.is_contiguous() and mass.dtype is torch.float32)
    batch = (q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out)
    if max_queries > 1:
        prefill_attention(*batch, window=window, sinks=sinks, soft_cap=soft_cap, mass=mass)
    # one sequence with several queries has no decode beside it
    if max_queries == 1 or len(seq_lens) > 1 or len(q) < 2:
        decode_attention(
            *batch,
            max_length=max_length,
            window=window,
            sinks=sinks,
            soft_cap=soft_cap,
            mass=mass,
            workspace=workspace,
        )
