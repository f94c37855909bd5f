"""Each op, in torch and in C++, against float64 arithmetic written out plainly, at odd sizes, with poisoned memory."""

import math

import numpy as np
import pytest
import torch

from kvloom.ops.activation import silu_mul
from kvloom.ops.attention import paged_attention
from kvloom.ops.kv_write import rope_kv_write
from kvloom.ops.linear import pack_linear
from kvloom.ops.native import stop_using_native
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.sampling import argmax
from support.compiled import use_compiled
from support.paged_batch import attention_in_float64, paged_batch

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(1)


NATIVE = ["C++", "C++ for AVX2"]


@pytest.fixture(params=["torch", *NATIVE], autouse=True)
def form(request):
    if request.param != "torch":
        machine = "haswell" if "AVX2" in request.param else "native"
        use_compiled(machine)
    yield request.param
    stop_using_native()


def close(actual: torch.Tensor, expected: torch.Tensor, dtype: torch.dtype) -> None:
    scale = expected.abs().max().item()
    assert (actual.double() - expected).abs().max().item() <= TOLERANCE[dtype] * max(scale, 1.0)


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """q [t, H, D] are the last tokens of k, v [L, Hkv, D]; float64, one query and head at a time."""
    out = torch.zeros_like(q)
    group = q.shape[1] // k.shape[1]
    for i in range(q.shape[0]):
        visible = k.shape[0] - q.shape[0] + i + 1
        for head in range(q.shape[1]):
            scores = k[:visible, head // group] @ q[i, head] * scale
            out[i, head] = torch.softmax(scores, 0) @ v[:visible, head // group]
    return out


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [
        (4, 4, 16, 8),
        (9, 3, 64, 16),
        (8, 1, 80, 32),
        (4, 2, 128, 64),
        (5, 1, 96, 8),
        (6, 3, 32, 32),
        (2, 2, 20, 16),
        (4, 2, 16, 48),
    ],
)
def test_paged_attention(dtype, heads, kv_heads, head_dim, block_size):
    # (tokens in the cache after this step, of which this step's): decodes, whole prompts, chunks, block edges
    shapes = [(1, 1), (block_size, 1), (block_size + 1, 1), (37, 5), (33, 33), (2 * block_size, block_size)]
    blocks_of = [-(-length // block_size) for length, _ in shapes]
    free = torch.randperm(sum(blocks_of) + 3).tolist()
    cache = torch.full((2, len(free), kv_heads, block_size, head_dim), math.nan, dtype=dtype)
    tables = torch.full((len(shapes), max(blocks_of) + 2), 999_999, dtype=torch.int32)
    starts, expected, queries = [0], [], []
    scale = head_dim**-0.5
    for row, ((length, count), blocks) in enumerate(zip(shapes, blocks_of, strict=True)):
        table = [free.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(table)
        # past its end a sequence's last block holds what an earlier one left: numbers, but not its own
        cache[:, table] = 1e3
        k, v = torch.randn(2, length, kv_heads, head_dim).to(dtype)
        for position in range(length):
            cache[0, table[position // block_size], :, position % block_size] = k[position]
            cache[1, table[position // block_size], :, position % block_size] = v[position]
        q = torch.randn(count, heads, head_dim).to(dtype)
        queries.append(q)
        expected.append(attend(q.double(), k.double(), v.double(), scale))
        starts.append(starts[-1] + count)
    lengths = torch.tensor([length for length, _ in shapes], dtype=torch.int32)
    starts_tensor = torch.tensor(starts, dtype=torch.int32)
    most = {"max_queries": max(count for _, count in shapes), "max_length": max(length for length, _ in shapes)}
    together = paged_attention(torch.cat(queries), cache[0], cache[1], tables, starts_tensor, lengths, scale, **most)
    close(together, torch.cat(expected), dtype)
    for row, q in enumerate(queries):
        alone = paged_attention(
            q,
            cache[0],
            cache[1],
            tables[row : row + 1],
            torch.tensor([0, len(q)], dtype=torch.int32),
            lengths[row : row + 1],
            scale,
            **most,
        )
        assert torch.equal(alone, together[starts[row] : starts[row + 1]]), "an answer depends on its neighbours"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [64, *(pytest.param(size, marks=pytest.mark.slow) for size in (32, 80, 96, 128))])
def test_attention_of_every_shape(dtype, head_dim):
    # a tile is 64 or 128 keys: decodes around its ends, chunks that begin within one, prompts, padding of many tasks
    shapes = [(1, 1), (63, 1), (65, 1), (128, 1), (130, 1), (140, 30), (100, 5), (9, 9), (0, 2), (0, 1), (0, 200)]
    for group, kv_heads, block_size in [(1, 2, 8), (2, 1, 64), (3, 3, 16), (5, 1, 24), (7, 1, 8), (8, 1, 32)]:
        batch = paged_batch(shapes, group * kv_heads, kv_heads, head_dim, block_size, dtype)
        close(paged_attention(*batch.arguments, **batch.most), attention_in_float64(batch), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kv_dtype", DTYPES)
def test_attention_to_a_cache_of_another_dtype(dtype, kv_dtype):
    batch = paged_batch([(150, 40), (70, 1)], 4, 2, 64, 32, dtype, kv_dtype)
    close(paged_attention(*batch.arguments, **batch.most), attention_in_float64(batch), dtype)


# not in torch, whose products round by their sizes
@pytest.mark.parametrize("form", NATIVE, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_is_the_same_however_it_is_divided(dtype, form):
    """Bit for bit: among threads, into chunks, and beside whatever neighbours.

    Only a bf16 decode is computed in another way than a chunk, and so rounded differently.
    """
    batch = paged_batch([(640, 640), (40, 33), (300, 1)], 4, 2, 64, 32, dtype)
    long, *neighbours = batch.q.split(batch.query_starts.diff().tolist())

    def attend_to(queries: list[torch.Tensor], rows: list[int], ends: list[int]) -> torch.Tensor:
        starts = torch.tensor([0, *np.cumsum([len(q) for q in queries])], dtype=torch.int32)
        most = {"max_queries": max(map(len, queries)), "max_length": max(ends)}
        caches, tables = (batch.k_cache, batch.v_cache), batch.block_tables[rows]
        lengths = torch.tensor(ends, dtype=torch.int32)
        return paged_attention(torch.cat(queries), *caches, tables, starts, lengths, batch.scale, **most)

    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        whole = attend_to([long], [0], [640])
        last = attend_to([long[-1:]], [0], [640])[0]
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            # few long tasks are divided among threads, many are not
            assert torch.equal(attend_to([long[-1:]], [0], [640])[0], last)
            assert torch.equal(attend_to([long[-50:]], [0], [640]), whole[-50:])
            assert torch.equal(attend_to([long[300:333]], [0], [333]), whole[300:333])
            beside = attend_to([neighbours[0], long[-1:], neighbours[1]], [1, 0, 2], [40, 640, 300])
            assert torch.equal(beside[33], last)
    finally:
        torch.set_num_threads(threads)
    expected = attention_in_float64(batch)[:640]
    close(whole[::100], expected[::100], dtype)
    close(last, expected[-1], dtype)
    if dtype is torch.float32:
        assert torch.equal(last, whole[-1])


# not in torch, whose products round by their sizes
@pytest.mark.parametrize("form", NATIVE, indirect=True)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(9, 3, 64), (14, 2, 80), (3, 3, 128)])
def test_many_decodes_are_each_as_if_alone(dtype, form, heads, kv_heads, head_dim):
    lengths = [1, 2, 15, 16, 17, 127, 128, 129, 255, 256, 257, 300, 31, 520, 64, 33]
    batch = paged_batch([(length, 1) for length in lengths], heads, kv_heads, head_dim, 16, dtype)
    together = paged_attention(*batch.arguments, **batch.most)
    close(together, attention_in_float64(batch), dtype)
    starts = torch.tensor([0, 1], dtype=torch.int32)
    for row in range(len(lengths)):
        own = slice(row, row + 1)
        alone = paged_attention(
            batch.q[own],
            batch.k_cache,
            batch.v_cache,
            batch.block_tables[own],
            starts,
            batch.seq_lens[own],
            batch.scale,
            **batch.most,
        )
        assert torch.equal(alone, together[own])


@pytest.mark.parametrize("dtype", DTYPES)
def test_attention_to_large_scores(dtype):
    """Scores far apart: what is e^-1000 of the largest is nothing, and nothing overflows.

    A score of 3,000 is rounded to a thousandth or so in fp32, and its weight with it.
    """
    batch = paged_batch([(300, 5)], 2, 1, 64, 32, dtype)
    batch.q.mul_(300)
    close(paged_attention(*batch.arguments, **batch.most), attention_in_float64(batch), torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [200, 300, 700])
def test_a_query_that_is_not_a_number_spoils_its_own_row_alone(dtype, length):
    """Within a part of the keys, over several, and where a long sequence's parts are divided among threads."""
    neighbours = [(300, 1), (300, 40)]
    threads = torch.get_num_threads()
    try:
        for shapes in ([(length, 1)], [(length, 30)], [neighbours[0], (length, 1)], [*neighbours, (length, 30)]):
            batch = paged_batch(shapes, 4, 2, 64, 32, dtype)
            spoiled = batch.q.clone()
            row, head = len(batch.q) - (3 if shapes[-1][1] > 1 else 1), 1
            spoiled[row, head, 5] = math.nan
            for count in (1, 3):
                torch.set_num_threads(count)
                before = paged_attention(*batch.arguments, **batch.most)
                after = paged_attention(spoiled, *batch.arguments[1:], **batch.most)
                assert after[row, head].isnan().all()
                before[row, head] = after[row, head] = 0.0
                assert torch.equal(after, before)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [200, 300])
def test_keys_that_are_not_numbers_spoil_their_own_sequence_alone(dtype, length):
    batch = paged_batch([(300, 1), (length, 1), (300, 40)], 4, 2, 64, 32, dtype)
    before = paged_attention(*batch.arguments, **batch.most)
    batch.k_cache[batch.block_tables[1, : -(-length // 32)].long()] = math.nan
    after = paged_attention(*batch.arguments, **batch.most)
    assert after[1].isnan().all()
    assert torch.equal(after[[0, *range(2, 42)]], before[[0, *range(2, 42)]])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rope_kv_write(dtype):
    heads, kv_heads, head_dim, block_size, tokens = 6, 2, 20, 4, 7
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * head_dim).to(dtype)
    positions = torch.tensor([0, 5, 6, 7, 3, 100, 31])
    slots = torch.tensor([3, 9, 10, 11, 0, 21, 30])
    frequency = 10_000.0 ** (-np.arange(0, head_dim, 2) / head_dim)
    angles = np.outer(np.arange(128), frequency)
    cos_sin = torch.from_numpy(np.concatenate([np.cos(angles), np.sin(angles)], 1)).float()
    k_cache, v_cache = torch.full((2, 8, kv_heads, block_size, head_dim), math.nan).to(dtype)
    q = rope_kv_write(qkv, cos_sin, positions, slots, k_cache, v_cache)

    x = qkv.double().view(tokens, -1, head_dim).numpy()
    # the pair (i, i + half) is a complex number that turns by position * frequency
    pairs = x[..., : head_dim // 2] + 1j * x[..., head_dim // 2 :]
    turned = pairs * np.exp(1j * np.outer(positions.numpy(), frequency))[:, None]
    rotated = torch.from_numpy(np.concatenate([turned.real, turned.imag], -1))
    close(q, rotated[:, :heads], dtype)
    for token, slot in enumerate(slots.tolist()):
        close(k_cache[slot // block_size, :, slot % block_size], rotated[token, heads : heads + kv_heads], dtype)
        written = v_cache[slot // block_size, :, slot % block_size]
        assert torch.equal(written, qkv.view(tokens, -1, head_dim)[token, heads + kv_heads :])
    assert int(k_cache[:, 0, :, 0].isnan().logical_not().sum()) == tokens, "slots that belong to nobody were written"
    # padding: queries as ever, and nothing written
    before = k_cache.clone()
    padding = torch.full_like(slots, -1)
    assert torch.equal(rope_kv_write(qkv, cos_sin, positions, padding, k_cache, v_cache), q)
    assert torch.equal(before.nan_to_num(7.0), k_cache.nan_to_num(7.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("hidden", [1, 37, 576])
def test_add_rms_norm(dtype, hidden):
    residual, update = torch.randn(5, hidden) * 30, torch.randn(5, hidden).to(dtype)
    weight = torch.randn(hidden).to(dtype)
    normed, total = add_rms_norm(residual, update, weight, 1e-5)
    expected = residual.double() + update.double()
    close(total, expected, torch.float32)
    close(normed, expected / (expected.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), dtype)
    assert normed.dtype == dtype
    first, unchanged = add_rms_norm(residual, None, weight, 1e-5)
    assert torch.equal(unchanged, residual)
    alone = residual.double()
    close(first, alone / (alone.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_silu_mul(dtype):
    gate_up = (torch.randn(3, 2 * 37) * 8).to(dtype)
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("out_features", "in_features"), [(960, 576), (48, 1536), (7, 33)])
def test_packed_linear(dtype, out_features, in_features):
    weight, x = torch.randn(out_features, in_features).to(dtype), torch.randn(65, in_features).to(dtype)
    linear = pack_linear(weight)
    whole = linear(x)
    expected = x.double() @ weight.double().T
    assert (whole.double() - expected).abs().max() <= TOLERANCE[dtype] * expected.abs().max()
    # what a row gives must not depend on how many rows there are
    for rows in (1, 2, 3, 8, 17, 32, 64):
        assert torch.equal(linear(x[:rows].contiguous()), whole[:rows]), rows


def test_likeliest_and_finite():
    torch.manual_seed(5)
    for vocab in (1, 7, 16, 33, 1000):
        logits = torch.randn(40, vocab)
        logits[0] = 3.0
        logits[1, vocab // 2 :] = 9.0
        logits[2] = -torch.finfo(torch.float32).max
        logits[3, -1] = torch.nan
        logits[4, 0] = torch.inf
        logits[5, vocab // 2] = -torch.inf
        tokens, fine = argmax(logits)
        assert fine.tolist() == [bool(np.isfinite(row).all()) for row in logits.numpy()]
        assert fine.tolist().count(False) == 3
        assert tokens[fine].tolist() == [int(np.argmax(row)) for row in logits[fine].numpy()]
