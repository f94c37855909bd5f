"""Decode attention: sequences with one query each. Several programs share a sequence's keys.

This is Flash-Decoding (Dao et al., 2023) over a paged cache (Kwon et al., 2023). Query heads that share a KV head are
the rows of one product, so that keys and values are read once. A second kernel joins the splits.
"""

import torch
import triton
import triton.language as tl

from kvloom.ops.gpu.attention_parts import LOG2_E, TYPES, load_rows, multiprocessors
from kvloom.ops.gpu.decode_splits import split_count

PART_TOKENS = 128
"""The least tokens of a split. So short sequences leave some splits empty."""


@triton.jit
def _decode_split(
    q,
    k_cache,
    v_cache,
    block_tables,
    query_starts,
    seq_lens,
    out,
    parts,
    sums,
    table_stride,
    factor,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    WIDTH: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    HEAD_STRIDE: tl.constexpr,
    TOKEN_STRIDE: tl.constexpr,
    TILE: tl.constexpr,
    SPLITS: tl.constexpr,
    PART_TILES: tl.constexpr,
    COMPUTE: tl.constexpr,
    STAGES: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return
    length = tl.load(seq_lens + sequence)
    tiles = tl.cdiv(length, TILE)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), PART_TILES)
    first_tile = split * each
    end_tile = tl.minimum(first_tile + each, tiles)

    row = tl.arange(0, ROWS)
    column = tl.arange(0, WIDTH)
    in_group = row < GROUP
    in_head = column < HEAD_DIM
    head = kv_head * GROUP + row
    HEADS: tl.constexpr = KV_HEADS * GROUP
    kept = in_group[:, None] & in_head[None, :]
    place = (start.to(tl.int64) * HEADS + head)[:, None] * HEAD_DIM + column[None, :]
    query = tl.load(q + place, mask=kept, other=0.0).to(COMPUTE)

    largest = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, WIDTH], tl.float32)
    for tile in tl.range(first_tile, end_tile, num_stages=STAGES):
        key = tile * TILE + tl.arange(0, TILE)
        inside = key < length
        block = tl.load(block_tables + sequence * table_stride + key // BLOCK_SIZE, mask=inside, other=0)
        at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (key % BLOCK_SIZE) * TOKEN_STRIDE
        keys = load_rows(k_cache, at, inside, HEAD_DIM, WIDTH, True).to(COMPUTE)
        values = load_rows(v_cache, at, inside, HEAD_DIM, WIDTH, True).to(COMPUTE)
        scores = tl.dot(query, tl.trans(keys), input_precision="ieee") * factor
        scores = tl.where(inside[None, :], scores, float("-inf"))
        # Every tile has a key inside, so that this is finite
        larger = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(shares, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(shares.to(COMPUTE), values, acc=mixed, input_precision="ieee")
        largest = larger

    # A split without tiles has zeros only, and the logarithm of its sum is that of 0
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    mixed = mixed / divisor[:, None]
    part = (sequence * HEADS + head) * SPLITS + split
    if SPLITS == 1:
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=kept)
    else:
        if first_tile < end_tile:
            tl.store(parts + part.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mixed, mask=kept)
        tl.store(sums + part, tl.where(some, largest + tl.log2(divisor), float("-inf")), mask=in_group)


@triton.jit
def _join_splits(
    parts,
    sums,
    query_starts,
    out,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    COLUMNS: tl.constexpr,
    SPLITS: tl.constexpr,
):
    sequence, head = tl.program_id(0), tl.program_id(1)
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return
    split = tl.arange(0, SPLITS)
    column = tl.program_id(2) * COLUMNS + tl.arange(0, COLUMNS)
    in_head = column < HEAD_DIM
    part = (sequence * HEADS + head) * SPLITS + split
    sum_of = tl.load(sums + part)
    some = sum_of > float("-inf")
    largest = tl.max(sum_of, 0)
    # Without any key there is no largest sum, and the result is 0
    weight = tl.where(some, tl.exp2(sum_of - tl.where(largest > float("-inf"), largest, 0.0)), 0.0)
    mask = some[:, None] & in_head[None, :]
    mixed = tl.load(parts + part.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mask=mask, other=0.0)
    total = tl.sum(weight, 0)
    result = tl.sum(mixed * weight[:, None], 0) / tl.where(total > 0, total, 1.0)
    place = (start.to(tl.int64) * HEADS + head) * HEAD_DIM + column
    tl.store(out + place, result.to(out.dtype.element_ty), mask=in_head)


def decode_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    query_starts: torch.Tensor,
    seq_lens: torch.Tensor,
    scale: float,
    out: torch.Tensor,
    *,
    max_length: int,
) -> None:
    """``paged_attention`` of the sequences with exactly one query. Other rows of ``out`` are not written.

    Args:
        q: [T, heads, head_dim]; for the other arguments, too, see ``paged_attention``.
        k_cache: [blocks, kv_heads, block_size, head_dim].
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M].
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        scale: factor on the scores.
        out: [T, heads, head_dim], written.
        max_length: the longest sequence, or more.
    """
    batch = len(seq_lens)
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    splits = split_count(batch, kv_heads, max_length, multiprocessors(q.device))
    compute = torch.promote_types(q.dtype, k_cache.dtype)
    width = max(16, triton.next_power_of_2(head_dim))
    tile, warps, stages = _sizes(width, compute)
    rows = batch * heads * splits if splits > 1 else 0
    parts = torch.empty(rows * head_dim, dtype=torch.float32, device=q.device)
    sums = torch.empty(rows, dtype=torch.float32, device=q.device)
    _decode_split[batch, kv_heads, splits](
        q,
        k_cache,
        v_cache,
        block_tables,
        query_starts,
        seq_lens,
        out,
        parts,
        sums,
        block_tables.stride(0),
        scale * LOG2_E,
        KV_HEADS=kv_heads,
        GROUP=group,
        ROWS=max(16, triton.next_power_of_2(group)),
        HEAD_DIM=head_dim,
        WIDTH=width,
        BLOCK_SIZE=block_size,
        BLOCK_STRIDE=k_cache.stride(0),
        HEAD_STRIDE=k_cache.stride(1),
        TOKEN_STRIDE=k_cache.stride(2),
        TILE=tile,
        SPLITS=splits,
        PART_TILES=max(1, PART_TOKENS // tile),
        COMPUTE=TYPES[compute],
        STAGES=stages,
        num_warps=warps,
    )
    if splits > 1:
        columns = min(width, 128)
        _join_splits[batch, heads, triton.cdiv(width, columns)](
            parts,
            sums,
            query_starts,
            out,
            HEADS=heads,
            HEAD_DIM=head_dim,
            COLUMNS=columns,
            SPLITS=splits,
            num_warps=8 if splits * columns > 4096 else 4,
        )


def _sizes(width: int, compute: torch.dtype) -> tuple[int, int, int]:
    """Keys per tile, warps, and pipeline stages.

    These are the largest that do not spill registers. fp32 has small tiles because it has no exact matrix instruction.
    """
    if compute is torch.float32:
        return 16, 4, 2
    return min(128, 8192 // width), 4, 2
