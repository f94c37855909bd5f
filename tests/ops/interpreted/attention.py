"""Paged attention in Triton against float64: odd sizes, permuted blocks, everything unused full of NaN."""

from unittest.mock import patch

import pytest
import torch

from kvloom.ops.attention import paged_attention
from kvloom.ops.gpu.decode_splits import (
    LEAST_TOKENS,
    MAX_PROGRAMS_PER_MULTIPROCESSOR,
    MAX_TOKENS,
    split_count,
)
from support.paged_batch import PagedBatch, attention_in_float64, full_of_nan, paged_batch

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


def check(batch: PagedBatch, max_length: int = 0, tolerance: float | None = None) -> None:
    most = batch.most
    most["max_length"] = max(max_length, most["max_length"])
    expected = attention_in_float64(batch)
    with patch("kvloom.ops.attention.empty", full_of_nan):
        out = paged_attention(*batch.arguments, **most)
    error = (out.double() - expected).abs().max().item()
    assert error <= (tolerance or TOLERANCE[batch.q.dtype]) * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), SIZES)
def test_decodes(dtype, heads, kv_heads, head_dim, block_size):
    batch = paged_batch(DECODES, heads, kv_heads, head_dim, block_size, dtype)
    # as if much longer ones were possible, so that there are many splits and most are empty
    check(batch, max_length=2048)


def test_decodes_of_short_sequences_are_not_split():
    check(paged_batch(DECODES, 6, 2, 64, 16, torch.float32), max_length=400)


@pytest.mark.parametrize(("dtype", "heads", "kv_heads", "head_dim", "block_size"), SIZES)
def test_chunks_and_decodes_together(dtype, heads, kv_heads, head_dim, block_size):
    check(paged_batch(MIXED, heads, kv_heads, head_dim, block_size, dtype))


def test_one_chunk_alone():
    check(paged_batch([(200, 150)], 4, 1, 64, 16, torch.float16))


@pytest.mark.parametrize("block_size", [8, 32, 256])
def test_block_sizes(block_size):
    check(paged_batch(DECODES, 6, 2, 64, block_size, torch.float16), max_length=2048)
    check(paged_batch(MIXED, 6, 2, 64, block_size, torch.float16))


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
    check(paged_batch(DECODES, heads, kv_heads, head_dim, block_size, dtype), max_length=2048)
    check(paged_batch(MIXED, heads, kv_heads, head_dim, block_size, dtype))
