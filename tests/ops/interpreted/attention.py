"""Paged attention in Triton against float64: odd sizes, permuted blocks, everything unused full of NaN."""

import math

import pytest
import torch

from kvloom.ops.attention import paged_attention
from kvloom.ops.gpu.decode_attention import decode_workspace
from kvloom.ops.gpu.decode_splits import (
    LEAST_TOKENS,
    MAX_PROGRAMS_PER_MULTIPROCESSOR,
    MAX_TOKENS,
    split_count,
)
from support.paged_batch import PagedBatch, attention_in_float64, paged_batch

TOLERANCE = {torch.float32: 5e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}

DECODES = [(1, 1), (150, 1), (0, 1), (16, 1), (17, 1), (305, 1), (0, 0), (64, 1)]
CHUNKS = [(37, 5), (33, 33), (64, 32), (90, 2)]
MIXED = [(70, 1), *CHUNKS, (0, 1), (5, 0), (129, 1), (0, 37)]
"""(Tokens in the cache, of which this step's); the last is padding of more queries than a tile has keys."""

SIZES = [  # dtype, heads, kv_heads, head_dim, block_size
    (torch.float32, 9, 3, 64, 16),
    (torch.float16, 9, 3, 64, 16),
    (torch.bfloat16, 9, 3, 64, 16),
    (torch.bfloat16, 8, 2, 128, 8),
    (torch.float32, 8, 1, 80, 32),
    (torch.float16, 5, 1, 96, 64),
    (torch.bfloat16, 2, 2, 32, 16),
    (torch.float32, 4, 2, 20, 16),
]


def check(batch: PagedBatch, max_length: int = 0, tolerance: float | None = None, **options) -> None:
    """Result and, where asked for, mass, into memory full of NaN."""
    most = batch.most
    most["max_length"] = max(max_length, most["max_length"])
    out = torch.full_like(batch.q, math.nan)
    mass = None
    if options.pop("with_mass", False):
        mass = torch.full((len(batch.seq_lens), batch.k_cache.shape[1], batch.block_tables.shape[1]), math.nan)
    expected, expected_mass = attention_in_float64(batch, **options)
    assert paged_attention(*batch.arguments, **most, **options, mass=mass, out=out) is out
    error = (out.double() - expected).abs().max().item()
    assert error <= (tolerance or TOLERANCE[batch.q.dtype]) * max(1.0, expected.abs().max().item())
    if mass is not None:
        # a page's share of a query is at most 1; what is summed are the queries and the heads of the group
        assert (mass.double() - expected_mass).abs().max() <= TOLERANCE[batch.q.dtype] * batch.q.shape[1]


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), SIZES)
def test_decodes(dtype, heads, kv_heads, head_dim, block_size):
    batch = paged_batch(DECODES, heads, kv_heads, head_dim, block_size, dtype)
    # as if much longer ones were possible, so that there are many splits and most are empty
    check(batch, max_length=2048)


def test_decodes_of_short_sequences_are_not_split():
    check(paged_batch(DECODES, 6, 2, 64, 16, torch.float32), max_length=400, with_mass=True)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), SIZES)
def test_chunks_and_decodes_together(dtype, heads, kv_heads, head_dim, block_size):
    check(paged_batch(MIXED, heads, kv_heads, head_dim, block_size, dtype))


def test_one_chunk_alone():
    check(paged_batch([(200, 150)], 4, 1, 64, 16, torch.float16), with_mass=True)


@pytest.mark.parametrize(
    ("dtype", "window", "sinks"),
    [
        (torch.float32, 1, 0),
        (torch.bfloat16, 7, 1),
        (torch.float32, 32, 4),
        (torch.float16, 40, 70),
        (torch.float32, 1000, 3),
    ],
)
def test_window_and_sinks(dtype, window, sinks):
    check(paged_batch(MIXED, 6, 2, 32, 16, dtype), window=window, sinks=sinks, with_mass=True)
    check(paged_batch(DECODES, 6, 2, 32, 16, dtype), max_length=2048, window=window, sinks=sinks, with_mass=True)


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_soft_cap(dtype):
    check(paged_batch(MIXED, 4, 2, 64, 16, dtype), soft_cap=0.5)
    check(paged_batch(MIXED, 4, 2, 64, 16, dtype), soft_cap=30.0, window=20, sinks=2, with_mass=True)


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_mass_of_pages(block_size):
    check(paged_batch(DECODES, 6, 2, 64, block_size, torch.float16), max_length=2048, with_mass=True)
    check(paged_batch(MIXED, 6, 2, 64, block_size, torch.float16), with_mass=True)


@pytest.mark.parametrize(
    ("dtype", "kv_dtype"),
    [(torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.float16, torch.float32)],
)
def test_cache_of_another_dtype(dtype, kv_dtype):
    check(paged_batch(MIXED, 4, 2, 64, 16, dtype, kv_dtype))


def test_scores_of_any_size():
    batch = paged_batch(MIXED, 4, 2, 64, 16, torch.float32)
    # rows whose softmax is all on one key, and rows whose largest score is far below 0
    batch.q[::2] *= 1e3
    check(batch, tolerance=2e-4)


def test_a_callers_workspace_is_enough_and_may_hold_anything():
    batch = paged_batch(DECODES, 6, 2, 64, 16, torch.float32)
    numbers = decode_workspace(len(DECODES), 6, 2, 64, 4096, torch.device("cpu"))
    workspace = torch.full((numbers,), math.nan)
    out = paged_attention(*batch.arguments, max_queries=1, max_length=4096, workspace=workspace)
    expected, _ = attention_in_float64(batch)
    assert (out.double() - expected).abs().max() <= TOLERANCE[torch.float32] * expected.abs().max()
    assert not workspace.isnan().all()


@pytest.mark.parametrize("multiprocessors", [108, 132, 304])
@pytest.mark.parametrize("kv_heads", [1, 3, 8, 32])
def test_split_count(multiprocessors, kv_heads):
    for batch in (1, 2, 7, 32, 128, 512):
        for length in (0, 1, 255, 1024, 8192, 131_072):
            splits = split_count(batch, kv_heads, length, multiprocessors)
            programs = batch * kv_heads * splits
            assert splits & (splits - 1) == 0
            assert splits == 1 or length / splits >= LEAST_TOKENS / 2, "parts too short to pay"
            if length >= 8192 and splits < 32:
                assert programs >= multiprocessors, "part of the machine has nothing to do"
            if programs < MAX_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors / 2:
                assert length / splits <= MAX_TOKENS, "a part that everything waits for"
            assert splits == 1 or programs <= 2 * MAX_PROGRAMS_PER_MULTIPROCESSOR * multiprocessors
            assert splits == split_count(batch, kv_heads, max(length - 1, length * 3 // 4), multiprocessors)


@pytest.mark.full
@pytest.mark.parametrize("head_dim", [32, 40, 72, 112, 128, 160, 256])
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (7, 1), (10, 2), (16, 1), (24, 1)])
def test_sweep(head_dim, heads, kv_heads):
    dtype = list(TOLERANCE)[heads % 3]
    block_size = [8, 16, 64, 128][(head_dim // 8 + heads) % 4]
    check(paged_batch(DECODES, heads, kv_heads, head_dim, block_size, dtype), max_length=2048, with_mass=True)
    check(paged_batch(MIXED, heads, kv_heads, head_dim, block_size, dtype), with_mass=True)
    check(paged_batch(MIXED, heads, kv_heads, head_dim, block_size, dtype), window=19, sinks=3)
