"""Prefill attention: sequences with several queries each, of different lengths, in one launch.

This is FlashAttention-2 (Dao, 2023) over a paged cache. A program computes a tile of queries of one KV head. All query
heads of the group are rows of the tile, so that keys and values are read once for all of them.
"""

import torch
import triton
import triton.language as tl

from kvloom.ops.gpu.attention_parts import LOG2_E, TYPES, architecture, load_rows


@triton.jit
def _sequence_of(query_starts, program, batch, QUERIES: tl.constexpr):
    """The sequence of a program. A sequence has one program per tile of queries, and at most one more.

    The programs of sequence b begin at ``query_starts[b] // QUERIES + b``. A binary search finds the last sequence
    that begins at or before the program.
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
    factor,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
    MASKED: tl.constexpr,
):
    """Add a tile of keys and values to the running softmax. Without a mask every query attends to the whole tile."""
    key = tile * TILE + tl.arange(0, TILE)
    inside = key < length
    block = tl.load(table + key // BLOCK_SIZE, mask=inside, other=0) if MASKED else tl.load(table + key // BLOCK_SIZE)
    at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (key % BLOCK_SIZE) * TOKEN_STRIDE
    keys = load_rows(k_cache, at, inside, HEAD_DIM, WIDTH, MASKED).to(COMPUTE)
    values = load_rows(v_cache, at, inside, HEAD_DIM, WIDTH, MASKED).to(COMPUTE)
    scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
    if MASKED:
        # Keys up to a query's position are all inside, so no other mask is needed
        scores = tl.where(key[None, :] <= position[:, None], scores, float("-inf"))
    larger = tl.maximum(largest, tl.max(scores, 1))
    shares = tl.exp2(scores - larger[:, None])
    shrink = tl.exp2(largest - larger)
    total = total * shrink + tl.sum(shares, 1)
    mixed = tl.dot(shares.to(COMPUTE), values, acc=mixed * shrink[:, None], input_precision="ieee")
    return larger, total, mixed


@triton.jit(do_not_specialize=["batch"])
def _prefill(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    seq_lens,
    out,
    table_stride,
    batch,
    factor,
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
    STAGES: tl.constexpr,
):
    kv_head = tl.program_id(0)
    # The last tiles of a sequence have the most keys, so they start first
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
    # Other rows are queries past the chunk's end. Their results are not stored
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
    tiles = tl.cdiv(before + last + 1, TILE)
    # Every query of the tile attends to these whole tiles. Padding has negative positions and so no tiles
    whole = tl.maximum(tl.minimum((before + first + 1) // TILE, tiles), 0)
    for tile in tl.range(0, whole, num_stages=STAGES):
        largest, total, mixed = _add_tile(
            query, k_cache, v_cache, table, largest, total, mixed, tile, position, length, kv_head, factor,
            HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, TILE, COMPUTE, False,
        )  # fmt: skip
    for tile in tl.range(whole, tiles, num_stages=STAGES):
        largest, total, mixed = _add_tile(
            query, k_cache, v_cache, table, largest, total, mixed, tile, position, length, kv_head, factor,
            HEAD_DIM, WIDTH, BLOCK_SIZE, BLOCK_STRIDE, HEAD_STRIDE, TOKEN_STRIDE, TILE, COMPUTE, True,
        )  # fmt: skip

    divisor = tl.where(total > 0, total, 1.0)
    tl.store(out + place, (mixed / divisor[:, None]).to(out.dtype.element_ty), mask=kept)


def prefill_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
) -> None:
    """``paged_attention`` of the sequences with more than one query. Other rows of ``out`` are not written.

    The grid depends only on T and B, so that the host does not wait for the GPU to know the lengths.

    Args:
        q: [T, heads, head_dim]; for the other arguments, too, see ``paged_attention``.
        k_cache: [blocks, kv_heads, block_size, head_dim].
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M].
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        scale: factor on the scores.
        out: [T, heads, head_dim], written.
    """
    batch = len(seq_lens)
    tokens, heads, head_dim = q.shape
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    compute = torch.promote_types(q.dtype, k_cache.dtype)
    width = max(16, triton.next_power_of_2(head_dim))
    rows, tile, warps, stages = _sizes(width, group, compute)
    queries = rows // group
    _prefill[kv_heads, tokens // queries + batch](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        seq_lens,
        out,
        block_tables.stride(0),
        batch,
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=rows,
        QUERIES=queries,
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        TILE=tile,
        COMPUTE=TYPES[compute],
        STAGES=stages,
        num_warps=warps,
    )


def _sizes(width: int, group: int, compute: torch.dtype) -> tuple[int, int, int, int]:
    """Query rows and keys per tile, warps, and pipeline stages.

    These are the largest that do not spill registers. fp32 has small tiles because it has no exact matrix instruction.
    """
    if compute is torch.float32:
        rows, tile, stages = 32, 16, 2
    elif width > 128:
        rows, tile, stages = 64, 32, 3
    elif architecture() == 90:
        # Hopper's matrix instructions read keys from shared memory, which leaves registers for more scores
        rows, tile, stages = 128, 64, 3
    else:
        rows, tile, stages = 128, 32, 3
    return max(rows, triton.next_power_of_2(group)), tile, 8, stages
