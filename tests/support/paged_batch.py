"""Ragged batches over a paged cache full of NaN, and their attention in float64, one query and head at a time."""

import math
from dataclasses import dataclass

import torch

UNREADABLE = 999_999
"""The number of a block that does not exist, for the rest of a block table."""


@dataclass(frozen=True)
class PagedBatch:
    """The arguments of ``paged_attention``, and the keys and values of each sequence, [length, kv_heads, head_dim]."""

    q: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    block_tables: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    scale: float
    keys: list[torch.Tensor]
    values: list[torch.Tensor]

    @property
    def arguments(self) -> tuple:
        return (self.q, self.k_cache, self.v_cache, self.block_tables, self.query_starts, self.seq_lens, self.scale)

    @property
    def most(self) -> dict[str, int]:
        counts = self.query_starts.diff()
        return {"max_queries": int(counts.max()), "max_length": int(self.seq_lens.max())}


def paged_batch(
    shapes: list[tuple[int, int]],
    heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    kv_dtype: torch.dtype | None = None,
) -> PagedBatch:
    """A batch of sequences. The shape of each is (tokens in the cache after this step, new tokens of this step)."""
    kv_dtype = kv_dtype or dtype
    blocks_of = [-(-length // block_size) for length, _ in shapes]
    free = torch.randperm(sum(blocks_of) + 3).tolist()
    # The second of three layers; keys and values of a block are adjacent as in the storage
    memory = torch.full((len(free), 3, 2, kv_heads, block_size, head_dim), math.nan, dtype=kv_dtype)
    k_cache, v_cache = memory[:, 1, 0], memory[:, 1, 1]
    tables = torch.full((len(shapes), max(blocks_of) + 2), UNREADABLE, dtype=torch.int32)
    starts, queries, keys, values = [0], [], [], []
    for row, ((length, count), blocks) in enumerate(zip(shapes, blocks_of, strict=True)):
        table = [free.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(table, dtype=torch.int32)
        k, v = torch.randn(2, length, kv_heads, head_dim).to(kv_dtype)
        for position in range(length):
            k_cache[table[position // block_size], :, position % block_size] = k[position]
            v_cache[table[position // block_size], :, position % block_size] = v[position]
        queries.append(torch.randn(count, heads, head_dim).to(dtype))
        keys.append(k.double())
        values.append(v.double())
        starts.append(starts[-1] + count)
    return PagedBatch(
        torch.cat(queries),
        k_cache,
        v_cache,
        tables,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor([length for length, _ in shapes], dtype=torch.int32),
        head_dim**-0.5,
        keys,
        values,
    )


def full_of_nan(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Replaces ``ops.native.empty``, so that numbers which an op does not write are NaN."""
    return torch.full(shape, math.nan, dtype=dtype, device=device)


def attention_in_float64(batch: PagedBatch) -> torch.Tensor:
    """Attention in float64. Returns [T, heads, head_dim]."""
    heads = batch.q.shape[1]
    kv_heads = batch.k_cache.shape[1]
    out = torch.zeros(batch.q.shape, dtype=torch.float64)
    starts = batch.query_starts.tolist()
    for b, (keys, values) in enumerate(zip(batch.keys, batch.values, strict=True)):
        length = len(keys)
        if not length:
            continue
        for row in range(starts[b], starts[b + 1]):
            seen = length - starts[b + 1] + row + 1
            for head in range(heads):
                kv_head = head * kv_heads // heads
                scores = keys[:seen, kv_head] @ batch.q[row, head].double() * batch.scale
                out[row, head] = torch.softmax(scores, 0) @ values[:seen, kv_head]
    return out
