"""Prefill attention: sequences with several queries, ragged, each against its own blocks, in one launch.

FlashAttention-2 (Dao, 2023) over a paged cache: a program computes a tile of queries of one KV head. The query heads of
the group are rows of the tile, so that keys and values are read once for all of them.
"""

import torch
import triton
import triton.language as tl

from kvloom.ops.gpu.attention_parts import (
    TYPES,
    architecture,
    load_rows,
    score_factors,
    scores_of,
    sees,
    tile_at,
    tiles_seen,
)
from kvloom.ops.gpu.page_mass import prefill_mass


@triton.jit
def _sequence_of(query_starts, program, batch, QUERIES: tl.constexpr):
    """The sequence of a program, where each has a program per started tile of queries, and one more at most.

    Sequence b begins at program ``query_starts[b] // QUERIES + b``; the last that begins no later is the one.
    """
    low = 0
    high = batch
    while high - low > 1:
        middle = (low + high) // 2
        begin = tl.load(query_starts + middle) // QUERIES + middle
        if begin <= program:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _add_tile(
    query,
    k_cache,
    v_cache,
    table,
    largest,
    total,
    mixed,
    tile,
    position,
    length,
    kv_head,
    inner,
    outer,
    window,
    sinks,
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
    MASKED: tl.constexpr,
):
    """Take a tile of keys and values into the running softmax; without a mask every query sees all of it."""
    key = tile * TILE + tl.arange(0, TILE)
    inside = key < length
    block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0) if MASKED else tl.load(table + key // BLOCK_SIZE)
    at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (key % BLOCK_SIZE) * TOKEN_STRIDE
    keys = load_rows(k_cache, at, inside, HEAD_DIM, WIDTH, MASKED).to(COMPUTE)
    values = load_rows(v_cache, at, inside, HEAD_DIM, WIDTH, MASKED).to(COMPUTE)
    scores = scores_of(tl.dot(query, tl.trans(keys), input_precision="ieee"), inner, outer, CAPPED)
    if MASKED:
        # a query is itself inside, and so is all that it may see
        seen = sees(position[:, None], key[None, :], window, sinks, WINDOWED)
        scores = tl.where(seen, scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    base = larger
    if WINDOWED:
        # a query may see nothing of a tile that another one needs, and nothing before it
        base = tl.where(larger > float("-inf"), larger, 0.0)
    shares = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(largest - base)
    total = total * shrink + tl.sum(shares, 1)
    mixed = tl.dot(shares.to(COMPUTE), values, acc=mixed * shrink[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit(do_not_specialize=["batch", "window", "sinks"])
def _prefill(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    seq_lens,
    out,
    sums,
    table_stride,
    batch,
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
    WITH_SUMS: tl.constexpr,
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # the last tiles of a sequence see the most keys: they begin first
    program = tl.num_programs(1) - 1 - tl.program_id(1)
    sequence = _sequence_of(query_starts, program, batch, QUERIES)
    start = tl.load(query_starts + sequence)
    count = tl.load(query_starts + sequence + 1) - start
    first = (program - (start // QUERIES + sequence)) * QUERIES
    if (count < 2) | (first >= count):
        return
    length = tl.load(seq_lens + sequence)
    last = tl.minimum(first + QUERIES, count) - 1

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    number = first + row // GROUP
    # rows that are left over in the tile are queries past the chunk's end; what they see is not stored
    used = (row < QUERIES * GROUP) & (number < count)
    kept = used[:, None] & (column < HEAD_DIM)[None, :]
    head_row = (start + number).to(tl.int64) * (KV_HEADS * GROUP) + kv_head * GROUP + row % GROUP
    place = head_row[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + place, mask=kept, other=0.0).to(COMPUTE)
    before = length - count
    position = before + number

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    table = block_tables + sequence * table_stride
    tiles, sink_tiles, window_tile = tiles_seen(before + first, before + last, window, sinks, TILE, WINDOWED)
    tiles = tl.minimum(tiles, tl.cdiv(length, TILE))
    whole = 0
    if not WINDOWED:
        # every query of the tile sees these as they are; padding, whose positions are negative, sees none
        whole = tl.maximum(tl.minimum((before + first + 1) // TILE, tiles), 0)
        for tile in tl.range(0, whole, num_stages=STAGES):
            largest, total, mixed = _add_tile(
                query, k_cache, v_cache, table, largest, total, mixed, tile, position, length, kv_head, inner, outer,
                window, sinks, HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, TILE, COMPUTE,
                WINDOWED, CAPPED, False,
            )  # fmt: skip
    for step in tl.range(whole, tiles, num_stages=STAGES):
        tile = tile_at(step, sink_tiles, window_tile, WINDOWED)
        largest, total, mixed = _add_tile(
            query, k_cache, v_cache, table, largest, total, mixed, tile, position, length, kv_head, inner, outer,
            window, sinks, HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, TILE, COMPUTE,
            WINDOWED, CAPPED, True,
        )  # fmt: skip

    some = total > 0
    divisor = tl.where(some, total, 1.0)
    tl.store(out + place, (mixed / divisor[:, None]).to(out.dtype.element_ty), mask=kept)
    if WITH_SUMS:
        tl.store(sums + head_row, tl.where(some, largest + tl.log2(divisor), 0.0), mask=used)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    window: int = 0,
    sinks: int = 0,
    soft_cap: float = 0.0,
    mass: torch.Tensor | None = None,
) -> None:
    """``paged_attention`` of those sequences that have more than one query; the others' rows are left alone.

    The grid depends on T and B alone, so that nothing waits for the GPU to know the lengths.

    Args:
        q: as of ``paged_attention``, and so are the others.
        k_cache: [blocks, kv_heads, block_size, head_dim].
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M].
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        scale: factor on the scores.
        out: [T, heads, head_dim], written.
        window: 0 or how many keys a query sees.
        sinks: first keys that a window never hides.
        soft_cap: 0 or the cap of scores.
        mass: fp32 [B, kv_heads, M]; rows of sequences with more than one query are written.
    """
    batch, pages = block_tables.shape
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    compute = torch.promote_types(q.dtype, k_cache.dtype)
    width = max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps, stages = _sizes(width, group, compute)
    inner, outer = score_factors(scale, soft_cap)
    sums = torch.empty(tokens * heads if mass is not None else 0, dtype=torch.float32, device=q.device)
    shape = {
        "KV_HEADS": kv_heads,
        "GROUP": group,
        "HEAD_DIM": head_dim,
        "WIDTH": width,
        "BLOCK_SIZE": block_size,
        "BLOCK_STRIDE": k_cache.stride(0),
        "HEAD_STRIDE": k_cache.stride(1),
        "TOKEN_STRIDE": k_cache.stride(2),
        "COMPUTE": TYPES[compute],
        "WINDOWED": window > 0,
        "CAPPED": soft_cap > 0,
    }
    queries = rows // group
    _prefill[kv_heads, tokens // queries + batch](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        seq_lens,
        out,
        sums,
        block_tables.stride(0),
        batch,
        inner,
        outer,
        window,
        sinks,
        ROWS=rows,
        QUERIES=queries,
        TILE=tile,
        WITH_SUMS=mass is not None,
        STAGES=stages,
        num_warps=warps,
        **shape,
    )
    if mass is not None:
        prefill_mass(q, k_cache, block_tables, query_starts, seq_lens, sums, mass, inner, outer, window, sinks, shape)


def _sizes(width: int, group: int, compute: torch.dtype) -> tuple[int, int, int, int]:
    """Rows of queries and keys of a tile, warps, and stages of the pipeline.

    The largest that spill no registers; products of fp32 have no matrix instruction that computes in fp32.
    """
    if compute is torch.float32:
        rows, tile, stages = 32, 16, 2
    elif width > 128:
        rows, tile, stages = 64, 32, 3
    elif architecture() == 90:
        # the matrix instructions of Hopper take keys from shared memory, which leaves registers for more scores
        rows, tile, stages = 128, 64, 3
    else:
        rows, tile, stages = 128, 32, 3
    return max(rows, triton.next_power_of_2(group)), tile, 8, stages
