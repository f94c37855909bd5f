"""Decode attention: sequences with one query, each over its blocks, the keys of one divided among programs.

Flash-Decoding (Dao et al., 2023) over a paged cache (Kwon et al., 2023). The query heads that share a KV head are the
rows of one product, so that keys and values are read once. A second kernel joins the parts.
"""

import torch
import triton
import triton.language as tl

from kvloom.ops.gpu.attention_parts import (
    TYPES,
    load_rows,
    multiprocessors,
    score_factors,
    scores_of,
    tile_at,
    tiles_seen,
)
from kvloom.ops.gpu.decode_splits import split_count
from kvloom.ops.gpu.page_mass import decode_mass

PART_TOKENS = 128
"""Least tokens of a part: short sequences use fewer splits than there are."""


@triton.jit(do_not_specialize=["pages", "window", "sinks"])
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
    unit_sums,
    table_stride,
    pages,
    inner,
    outer,
    window,
    sinks,
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
    UNIT: tl.constexpr,
    SPLITS: tl.constexpr,
    PART_TILES: tl.constexpr,
    COMPUTE: tl.constexpr,
    WINDOWED: tl.constexpr,
    CAPPED: tl.constexpr,
    WITH_MASS: tl.constexpr,
    STAGES: tl.constexpr,
):
    sequence, kv_head, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    start = tl.load(query_starts + sequence)
    if tl.load(query_starts + sequence + 1) - start != 1:
        return
    length = tl.load(seq_lens + sequence)
    tiles, sink_tiles, window_tile = tiles_seen(length - 1, length - 1, window, sinks, TILE, WINDOWED)
    each = tl.maximum(tl.cdiv(tiles, SPLITS), PART_TILES)
    first_step = split * each
    last_step = tl.minimum(first_step + each, tiles)

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
    for step in tl.range(first_step, last_step, num_stages=STAGES):
        tile = tile_at(step, sink_tiles, window_tile, WINDOWED)
        key = tile * TILE + tl.arange(0, TILE)
        inside = key < length
        block = tl.load(block_tables + sequence * table_stride + key // BLOCK_SIZE, mask=inside, other=0)
        at = block.to(tl.int64) * BLOCK_STRIDE + kv_head * HEAD_STRIDE + (key % BLOCK_SIZE) * TOKEN_STRIDE
        keys = load_rows(k_cache, at, inside, HEAD_DIM, WIDTH, True).to(COMPUTE)
        values = load_rows(v_cache, at, inside, HEAD_DIM, WIDTH, True).to(COMPUTE)
        scores = scores_of(tl.dot(query, tl.trans(keys), input_precision="ieee"), inner, outer, CAPPED)
        seen = inside
        if WINDOWED:
            seen = seen & ((key < sinks) | (key >= length - window))
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # every tile has a key that is seen, so that this is a number
        larger = tl.maximum(largest, tl.max(scores, 1))
        shares = tl.exp2(scores - larger[:, None])
        shrink = tl.exp2(largest - larger)
        total = total * shrink + tl.sum(shares, 1)
        mixed = mixed * shrink[:, None]
        mixed = tl.dot(shares.to(COMPUTE), values, acc=mixed, input_precision="ieee")
        largest = larger
        if WITH_MASS:
            units: tl.constexpr = TILE // UNIT
            mass = tl.sum(tl.reshape(shares, [ROWS, units, UNIT]), 2)
            unit = tile * units + tl.arange(0, units)
            count = pages * (BLOCK_SIZE // UNIT)
            to = (sequence * HEADS + head).to(tl.int64)[:, None] * count + unit[None, :]
            known = in_group[:, None] & (unit < count)[None, :]
            tl.store(unit_sums + to, larger[:, None] + tl.log2(mass), mask=known)

    # no tile: nothing but zeros, whose sum is the logarithm of 0
    some = total > 0
    divisor = tl.where(some, total, 1.0)
    mixed = mixed / divisor[:, None]
    part = (sequence * HEADS + head) * SPLITS + split
    if SPLITS == 1:
        tl.store(out + place, mixed.to(out.dtype.element_ty), mask=kept)
    else:
        if first_step < last_step:
            tl.store(parts + part.to(tl.int64)[:, None] * HEAD_DIM + column[None, :], mixed, mask=kept)
    if SPLITS > 1 or WITH_MASS:
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
    # without any key there is no largest sum, and the result is 0
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
    window: int = 0,
    sinks: int = 0,
    soft_cap: float = 0.0,
    mass: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    splits: int | None = None,
) -> None:
    """``paged_attention`` of those sequences that have exactly one query; the others' rows of ``out`` are left alone.

    Rows of ``mass`` are written for sequences with at most one query.

    Args:
        q: as of ``paged_attention``, and so are the others.
        k_cache: [blocks, kv_heads, block_size, head_dim].
        v_cache: like ``k_cache``.
        block_tables: int32 [B, M].
        query_starts: int32 [B + 1].
        seq_lens: int32 [B].
        scale: factor on the scores.
        out: [T, heads, head_dim], written.
        max_length: at least the longest sequence.
        window: 0 or how many keys a query sees.
        sinks: first keys that a window never hides.
        soft_cap: 0 or the cap of scores.
        mass: fp32 [B, kv_heads, M].
        workspace: fp32, at least ``decode_workspace`` numbers, for what the kernels pass on; None allocates it.
        splits: parts that a sequence's keys are divided into, a power of two; chosen by ``split_count`` where None.
    """
    batch, pages = block_tables.shape
    heads, head_dim = q.shape[1:]
    kv_heads, block_size = k_cache.shape[1:3]
    group = heads // kv_heads
    seen = min(max_length, window + sinks) if window else max_length
    if splits is None:
        splits = split_count(batch, kv_heads, seen, multiprocessors(q.device))
    compute = torch.promote_types(q.dtype, k_cache.dtype)
    width = max(16, triton.next_power_of_2(head_dim))
    tile, warps, stages = _sizes(width, compute)
    unit = min(tile, block_size)
    numbers = _numbers(batch, heads, head_dim, splits, pages * (block_size // unit) if mass is not None else 0)
    if workspace is None:
        workspace = torch.empty(sum(numbers), dtype=torch.float32, device=q.device)
    assert workspace.dtype is torch.float32 and workspace.numel() >= sum(numbers)
    parts, sums, unit_sums = workspace[: sum(numbers)].split(numbers)
    inner, outer = score_factors(scale, soft_cap)
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
        unit_sums,
        block_tables.stride(0),
        pages,
        inner,
        outer,
        window,
        sinks,
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
        UNIT=unit,
        SPLITS=splits,
        PART_TILES=max(1, PART_TOKENS // tile),
        COMPUTE=TYPES[compute],
        WINDOWED=window > 0,
        CAPPED=soft_cap > 0,
        WITH_MASS=mass is not None,
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
    if mass is not None:
        options = {"group": group, "block_size": block_size, "unit": unit, "splits": splits}
        decode_mass(sums, unit_sums, query_starts, seq_lens, mass, window, sinks, **options)


def decode_workspace(
    batch: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    max_length: int,
    device: torch.device,
) -> int:
    """Numbers of the workspace that ``decode_attention`` needs at most for these shapes without mass.

    Args:
        batch: sequences.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head.
        max_length: longest sequence.
        device: where it runs, whose size chooses the splits.
    """
    splits = split_count(batch, kv_heads, max_length, multiprocessors(device))
    return sum(_numbers(batch, heads, head_dim, splits, 0))


def _sizes(width: int, compute: torch.dtype) -> tuple[int, int, int]:
    """Keys of a tile, warps, and stages of the pipeline.

    The largest that spill no registers; products of fp32 have no matrix instruction that computes in fp32.
    """
    if compute is torch.float32:
        return 16, 4, 2
    return min(128, 8192 // width), 4, 2


def _numbers(batch: int, heads: int, head_dim: int, splits: int, units: int) -> list[int]:
    """Numbers of the workspace's parts: mixed values and sums of splits, and sums of units of pages."""
    rows = batch * heads
    return [rows * splits * head_dim if splits > 1 else 0, rows * splits, rows * units]
