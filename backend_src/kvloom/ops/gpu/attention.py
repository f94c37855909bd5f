"""Chooses the attention kernels for a batch."""

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
) -> None:
    """``paged_attention`` on a GPU, with one kernel for the chunks and one for the decodes of a batch.

    Each kernel skips the sequences of the other one. The host does not know them without waiting for the GPU.
    """
    assert q.is_contiguous() and out.is_contiguous() and k_cache.stride() == v_cache.stride() and k_cache.stride(3) == 1
    assert block_tables.stride(1) == 1 and query_starts.is_contiguous() and seq_lens.is_contiguous()
    batch = (q, k_cache, v_cache, block_tables, query_starts, seq_lens, scale, out)
    if max_queries > 1:
        prefill_attention(*batch)
    # A batch of one sequence with several queries has no decodes
    if max_queries == 1 or len(seq_lens) > 1 or len(q) < 2:
        decode_attention(*batch, max_length=max_length)
