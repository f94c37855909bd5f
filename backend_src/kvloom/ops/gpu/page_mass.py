"""How much of the probability each page got: what eviction policies like H2O (Zhang et al., 2023) add up.

Without atomics: a program owns the pages that it sums, so that the same step gives the same numbers.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from kvloom.ops.gpu.attention_parts import load_rows, scores_of


@triton.jit(do_not_specialize=["pages", "window", "sinks"])
def _decode_mass(
    sums,
    unit_sums,
    query_starts,
    seq_lens,
    mass,
    pages,
    window,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    UNITS: tl.constexpr,
    PAGES: tl.constexpr,
    SPLITS: tl.constexpr,
    WINDOWED: tl.constexpr,
):
    sequence, kv_head = tl.program_id(0), tl.program_id(1)
    count = tl.load(query_starts + sequence + 1) - tl.load(query_starts + sequence)
    if count > 1:
        return
    length = tl.load(seq_lens + sequence) * count
    page = tl.program_id(2) * PAGES + tl.arange(0, PAGES)
    unit = page[:, None] * UNITS + tl.arange(0, UNITS)[None, :]
    UNIT: tl.constexpr = BLOCK_SIZE // UNITS
    seen = unit * UNIT < length
    if WINDOWED:
        seen = seen & ((unit * UNIT < sinks) | ((unit + 1) * UNIT > length - window))
    got = tl.zeros([PAGES], tl.float32)
    for member in tl.static_range(GROUP):
        head = sequence * KV_HEADS * GROUP + kv_head * GROUP + member
        sum_of = tl.load(sums + head * SPLITS + tl.arange(0, SPLITS))
        largest = tl.max(sum_of, 0)
        largest = tl.where(largest > float("-inf"), largest, 0.0)
        total = largest + tl.log2(tl.sum(tl.exp2(sum_of - largest), 0))
        at = head.to(tl.int64) * (pages * UNITS) + unit
        unit_sum = tl.load(unit_sums + at, mask=seen, other=float("-inf"))
        got += tl.sum(tl.where(seen, tl.exp2(unit_sum - total), 0.0), 1)
    to = (sequence * KV_HEADS + kv_head).to(tl.int64) * pages + page
    tl.store(mass + to, got, mask=page < pages)


@triton.jit(do_not_specialize=["pages", "window", "sinks"])
def _prefill_mass(
    q,
    k_cache,
    block_tables,
    query_starts,
    seq_lens,
    sums,
    mass,
    table_stride,
    pages,
    inner,
    outer,
    window,
    sinks,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    QUERIES: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
):
    """A program sums the probability that the keys of one or more whole pages got from all queries of the step."""
    span, kv_head, sequence = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    if count < 2:
        return
    length = tl.load(seq_lens + sequence)
    before = length - count
    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    in_head = column < HEAD_DIM
    PAGES: tl.constexpr = max(1, TILE // BLOCK_SIZE)
    TILES: tl.constexpr = max(1, BLOCK_SIZE // TILE)
    got = tl.zeros([PAGES], tl.float32)
    for part in tl.range(0, TILES):
        key = (span * TILES + part) * TILE + tl.arange(0, TILE)
        inside = key < length
        block = tl.load(block_tables + sequence * table_stride + key // BLOCK_SIZE, mask=inside, other=0)
        at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (key % BLOCK_SIZE) * TOKEN_STRIDE
        keys = load_rows(k_cache, at, inside, HEAD_DIM, WIDTH, True).to(COMPUTE)
        of_key = tl.zeros([TILE], tl.float32)
        # queries before the tile see none of it
        for first in tl.range(
            tl.maximum((span * TILES + part) * TILE - before, 0) // QUERIES * QUERIES, count, QUERIES
        ):
            number = first + row // GROUP
            used = (row < QUERIES * GROUP) & (number < count)
            position = before + number
            head_row = (start + number).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
            kept = used[:, None] & in_head[None, :]
            query = tl.load(q + head_row[:, None] * HEAD_DIM + column[None, :], mask=kept, other=0.0).to(COMPUTE)
            sum_of = tl.load(sums + head_row, mask=used, other=0.0)
            scores = scores_of(tl.dot(query, tl.trans(keys), input_precision="ieee"), inner, outer, CAPPED)
            seen = used[:, None] & inside[None, :] & (key[None, :] <= position[:, None])
            if WINDOWED:
                seen = seen & ((key[None, :] < sinks) | (key[None, :] > position[:, None] - window))
            of_key += tl.sum(tl.where(seen, tl.exp2(scores - sum_of[:, None]), 0.0), 0)
        got += tl.sum(tl.reshape(of_key, [PAGES, TILE // PAGES]), 1)
    page = span * PAGES + tl.arange(0, PAGES)
    tl.store(mass + (sequence * KV_HEADS + kv_head).to(tl.int64) * pages + page, got, mask=page < pages)


def decode_mass(
    sums: torch.Tensor,
    unit_sums: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    mass: torch.Tensor,
    window: int,
    sinks: int,
    *,
    group: int,
    block_size: int,
    unit: int,
    splits: int,
) -> None:
    """Mass of the sequences with at most one query, from what the decode kernel has stored on its way.

    Args:
        sums: fp32 [B * heads * splits], log2 of the exponentials' sum in each split.
        unit_sums: fp32 [B * heads * M * block_size / unit], the same of each unit of keys that was seen.
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        mass: fp32 [B, kv_heads, M], those sequences' rows are written.
        window: 0 or how many keys a query sees.
        sinks: first keys that a window never hides.
        group: query heads of a KV head.
        block_size: keys of a page.
        unit: keys of a unit, at most a page.
        splits: of the decode kernel.
    """
    batch, kv_heads, pages = mass.shape
    units = block_size // unit
    pages_each = max(1, 64 // units)
    _decode_mass[batch, kv_heads, triton.cdiv(pages, pages_each)](
        sums,
        unit_sums,
        query_starts,
        seq_lens,
        mass,
        pages,
        window,
        sinks,
        KV_HEADS=kv_heads,
        GROUP=group,
        BLOCK_SIZE=block_size,
        UNITS=units,
        PAGES=pages_each,
        SPLITS=splits,
        WINDOWED=window > 0,
        num_warps=2,
    )


def prefill_mass(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    sums: torch.Tensor,
    mass: torch.Tensor,
    inner: float,
    outer: float,
    window: int,
    sinks: int,
    shape: dict[str, Any],
) -> None:
    """Mass of the sequences with more than one query: their scores are computed once more, page by page.

    Args:
        q: [T, heads, head_dim].
        k_cache: [blocks, kv_heads, block_size, head_dim].
        block_tables: int32 [B, M].
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        sums: fp32 [T * heads], log2 of the exponentials' sum of each query and head.
        mass: fp32 [B, kv_heads, M], those sequences' rows are written.
        inner: see ``score_factors``.
        outer: see ``score_factors``.
        window: 0 or how many keys a query sees.
        sinks: first keys that a window never hides.
        shape: constants of the prefill kernel.
    """
    batch, kv_heads, pages = mass.shape
    group, block_size, tile = shape["GROUP"], shape["BLOCK_SIZE"], 64
    rows = max(64, triton.next_power_of_2(group))
    _prefill_mass[triton.cdiv(pages * block_size, max(tile, block_size)), kv_heads, batch](
        q,
        k_cache,
        block_tables,
        query_starts,
        seq_lens,
        sums,
        mass,
        block_tables.stride(0),
        pages,
        inner,
        outer,
        window,
        sinks,
        ROWS=rows,
        QUERIES=rows // group,
        TILE=tile,
        num_warps=4,
        **shape,
    )
