"""Correctness: compares each op with float64 on new random inputs, in memory that was filled with NaN."""

import random
from collections.abc import Iterator
from typing import Any

import torch

from kvloom.executor.step_buffers import SamplingTensors
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.kv.transfer import copy_blocks
from kvloom.ops.activation import silu_mul
from kvloom.ops.attention import paged_attention
from kvloom.ops.gpu.linear import QuantizedLinear
from kvloom.ops.kv_write import rope_kv_write
from kvloom.ops.linear import pack_linear
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.penalties import Edits
from kvloom.ops.sampling import NOT_FINITE, sample_tokens
from kvloom_gpu import reference
from kvloom_gpu.launches import BLOCK_SIZE, Shape
from kvloom_gpu.sizes import Sizes

LIMIT = {torch.bfloat16: 1e-2, torch.float32: 1e-5}
"""The maximum of |result - reference| / |reference| for a result's dtype. For fp32 it allows another order of sums."""

EPS = 1e-5


def rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """One row per check: name, shape, error, limit, ok."""
    for dtype, shapes in sizes.checked:
        for shape in shapes:
            yield from _pointwise(sizes, shape, dtype)
            yield from _rope(sizes, shape, dtype)
            yield from _attention(sizes, shape, dtype)
    # A server's activations with quantized weights
    yield from _quantized(sizes, sizes.checked[0][0])
    yield from _sampling(sizes)
    yield from _blocks(sizes)


def poison(device: torch.device) -> None:
    """Fill memory with NaN and free it, so that numbers which an op does not write are NaN."""
    if device.type == "cuda":
        for size in (1 << 17, 1 << 20, 1 << 26):
            held = [torch.full((size,), torch.nan, device=device) for _ in range(8)]
            del held


def _row(
    check: str, shape: str, result: torch.Tensor, expected: torch.Tensor, limit: float | None = None
) -> dict[str, Any]:
    limit = LIMIT[result.dtype] if limit is None else limit
    error = float((result.double() - expected).norm() / expected.norm().clamp(min=1e-30))
    # NaN is not below the limit
    return {"check": check, "shape": shape, "error": error, "limit": limit, "ok": error <= limit}


def _truth(check: str, shape: str, ok: bool, detail: str = "") -> dict[str, Any]:
    return {"check": check, "shape": shape, "ok": ok, "detail": detail}


def _name(shape: Shape, dtype: torch.dtype) -> str:
    return f"{shape.name} {str(dtype).removeprefix('torch.')}"


def _pointwise(sizes: Sizes, shape: Shape, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    device, name = sizes.device, _name(shape, dtype)
    poison(device)
    residual = torch.randn(17, shape.hidden, device=device)
    update = torch.randn(17, shape.hidden, device=device).to(dtype)
    weight = torch.randn(shape.hidden, device=device).to(dtype)
    chosen = torch.tensor([16, 3], device=device)
    normed, total = add_rms_norm(residual, update, weight, EPS)
    yield _row("norm", name, normed, reference.rms_norm(residual.double() + update.double(), weight, EPS))
    yield _row("norm's sum", name, total, residual.double() + update.double())
    normed, _ = add_rms_norm(residual, update, weight, EPS, chosen)
    yield _row(
        "norm of rows", name, normed, reference.rms_norm((residual.double() + update.double())[chosen], weight, EPS)
    )
    gate_up = torch.randn(17, 2 * shape.intermediate, device=device).to(dtype)
    yield _row("activation", name, silu_mul(gate_up), reference.silu_mul(gate_up))
    matrix = torch.randn(shape.intermediate, shape.hidden, device=device).to(dtype)
    product = pack_linear(matrix)(normed, torch.float32)
    yield _row("product", name, product, normed.double() @ matrix.double().T)


def _quantized(sizes: Sizes, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    """Products with weights of 8 and 4 bits, at a shape that is no multiple of a block."""
    device, out_features, in_features = sizes.device, 3 * sizes.chunk + 2, sizes.long + 2 * BLOCK_SIZE
    for bits, group, kind in ((8, 32, ""), (4, 32, ""), (4, 32, " and minima"), (4, 128, " and minima")):
        values = torch.randint(0, 256, (out_features, in_features), device=device, dtype=torch.uint8)
        values = values.view(torch.int8) if bits == 8 else values & 0xF
        scales, minima = torch.rand(2, out_features, -(-in_features // group), device=device).half()
        column = torch.arange(in_features, device=device) // group
        lowest = (-8 * (bits == 4) * scales) if not kind else -15 * minima
        weight = values.double() * scales.double()[:, column] + lowest.double()[:, column]
        product = QuantizedLinear(bits, values, scales, lowest if bits == 4 else None, group)
        name = f"int{bits} by {group}{kind}"
        for rows in (1, 9, 19, 70):
            x = torch.randn(rows, in_features, device=device).to(dtype)
            poison(device)
            yield _row(f"product, {name}", f"{rows} rows, {dtype}", product(x), x.double() @ weight.T)
        ids = torch.randint(out_features, (5,), device=device)
        poison(device)
        yield _row(f"rows, {name}", f"5 of {out_features}", product.rows(ids), weight[ids])


def _rope(sizes: Sizes, shape: Shape, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    device, name, tokens, blocks = sizes.device, _name(shape, dtype), 19, 4
    heads, kv_heads, width = shape.n_heads, shape.n_kv_heads, shape.head_dim
    poison(device)
    qkv = torch.randn(tokens, heads + 2 * kv_heads, width, device=device).to(dtype)
    cos_sin = torch.randn(100, width, device=device)
    positions = torch.randint(100, (tokens,), device=device)
    slots = torch.randperm(blocks * BLOCK_SIZE, device=device)[:tokens]
    slots[-2:] = -1
    k_cache, v_cache = _caches(sizes, shape, dtype, blocks)
    k_cache.fill_(3), v_cache.fill_(3)
    queries = rope_kv_write(qkv.view(tokens, -1), cos_sin, positions, slots, k_cache, v_cache)
    turned = reference.rotate(qkv[:, : heads + kv_heads], cos_sin[positions])
    yield _row("rope of queries", name, queries, turned[:, :heads])
    expected_k, expected_v = torch.full((2, *k_cache.shape), 3.0, dtype=torch.float64, device=device)
    for token, slot in enumerate(slots.tolist()):
        if slot >= 0:
            expected_k[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = turned[token, heads:]
            expected_v[slot // BLOCK_SIZE, :, slot % BLOCK_SIZE] = qkv[token, heads + kv_heads :].double()
    yield _row("rope of keys, cache write", name, k_cache, expected_k)
    yield _row("cache write of values", name, v_cache, expected_v, 0.0)


def _caches(sizes: Sizes, shape: Shape, dtype: torch.dtype, blocks: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of the second of two layers, so that blocks are strided."""
    geometry = BlockGeometry(2, shape.n_kv_heads, shape.head_dim, BLOCK_SIZE)
    return Storage(PlainCodec(dtype), geometry, blocks, sizes.device).layers[1]


def _attention(sizes: Sizes, shape: Shape, dtype: torch.dtype) -> Iterator[dict[str, Any]]:
    long, chunk, edge = sizes.long, sizes.chunk, BLOCK_SIZE
    rng = random.Random(torch.initial_seed())
    decodes = [(1, length) for length in (1, edge - 1, edge, edge + 1, long, 0, rng.randrange(1, long))]
    chunks = [(chunk, chunk), (chunk, long), (17, 17 + edge), (0, 5), (1, 1), (edge, 2 * edge)]
    for kind, batch in {"decode": decodes, "prefill": chunks, "mixed": [*decodes, *chunks]}.items():
        yield _one_attention(sizes, shape, dtype, kind, batch)


def _one_attention(
    sizes: Sizes, shape: Shape, dtype: torch.dtype, kind: str, batch: list[tuple[int, int]]
) -> dict[str, Any]:
    device, width, scale = sizes.device, shape.head_dim, shape.head_dim**-0.5
    counts, lengths = [count for count, _ in batch], [length for _, length in batch]
    needed = [-(-length // BLOCK_SIZE) for length in lengths]
    k_cache, v_cache = _caches(sizes, shape, dtype, sum(needed) + 3)
    # Unused memory is NaN
    k_cache.fill_(torch.nan), v_cache.fill_(torch.nan)
    free = torch.randperm(len(k_cache)).tolist()
    tables = torch.zeros(len(batch), -(-max(needed) // 16) * 16, dtype=torch.int32)
    keys, values = [], []
    for row, (length, blocks) in enumerate(zip(lengths, needed, strict=True)):
        mine = [free.pop() for _ in range(blocks)]
        tables[row, :blocks] = torch.tensor(mine, dtype=torch.int32)
        pair = torch.randn(2, length, shape.n_kv_heads, width, device=device).to(dtype)
        keys.append(pair[0])
        values.append(pair[1])
        place = torch.arange(length, device=device)
        block, offset = torch.tensor(mine, dtype=torch.int64, device=device)[place // BLOCK_SIZE], place % BLOCK_SIZE
        k_cache[block, :, offset], v_cache[block, :, offset] = pair[0], pair[1]
    starts = torch.tensor([0, *counts]).cumsum(0)
    q = torch.randn(sum(counts), shape.n_heads, width, device=device).to(dtype)
    poison(device)
    result = paged_attention(
        q,
        k_cache,
        v_cache,
        tables.to(device),
        starts.int().to(device),
        torch.tensor(lengths, dtype=torch.int32, device=device),
        scale,
        max_queries=max(counts),
        max_length=max(lengths),
    )
    expected = torch.zeros(q.shape, dtype=torch.float64, device=device)
    for row, length in enumerate(lengths):
        here = slice(int(starts[row]), int(starts[row + 1]))
        if length:
            expected[here] = reference.attention(q[here], keys[row], values[row], scale)
    return _row(f"attention: {kind}", _name(shape, dtype), result, expected)


def _sampling(sizes: Sizes) -> Iterator[dict[str, Any]]:
    device, vocab, count = sizes.device, sizes.vocab, sizes.sampled
    rng = random.Random(torch.initial_seed())
    logits = 4 * torch.randn(count, vocab, device=device)
    logits[0, vocab // 2] = torch.nan
    logits[1, 0] = torch.inf
    before = logits.clone()
    params = [
        (
            rng.choice([0.0, 0.5, 1.0, 1.7]),
            rng.choice([0.0, 0.0, 0.02]),
            rng.choice([1, 5, 50, vocab, vocab]),
            rng.choice([1.0, 1.0, 0.3, 0.9]),
            rng.random(),
        )
        for _ in range(count)
    ]
    kinds = (torch.float32, torch.float32, torch.int64, torch.float32, torch.float64)
    columns = zip(zip(*params, strict=True), kinds, strict=True)
    draws = SamplingTensors(*(torch.tensor(column, dtype=kind, device=device) for column, kind in columns))
    poison(device)
    tokens, logprobs = sample_tokens(logits, *draws.tensors)
    yield _truth("sampling: not finite", f"V{vocab}", tokens[:2].tolist() == [NOT_FINITE] * 2)
    yield _truth("sampling: logits unchanged", f"V{vocab}", bool(torch.equal(logits[2:], before[2:])))
    wrong, clear = [], 0
    for row in range(2, count):
        expected, near = reference.draw(before[row], *params[row])
        clear += not near
        if not near and int(tokens[row]) != expected:
            wrong.append((row, params[row], int(tokens[row]), expected))
    yield _truth("sampling: tokens", f"V{vocab}", not wrong and clear > count // 2, f"{clear} clear rows; {wrong[:3]}")
    expected_logprobs = before[2:].double().log_softmax(-1).gather(1, tokens[2:, None])[:, 0]
    yield _row("sampling: log probabilities", f"V{vocab}", logprobs[2:], expected_logprobs)

    banned = torch.ones(vocab, dtype=torch.bool, device=device)
    banned[7] = False
    zeros = torch.zeros(vocab, dtype=torch.float64, device=device)
    index = 2 * vocab + torch.arange(vocab, device=device)
    tokens, _ = sample_tokens(logits, *draws.tensors, Edits(index, zeros, zeros + 1, zeros, banned))
    yield _truth("sampling: bans", f"V{vocab}", int(tokens[2]) == 7 and bool(torch.equal(logits[2:], before[2:])))


def _blocks(sizes: Sizes) -> Iterator[dict[str, Any]]:
    device, count = sizes.device, 24
    geometry = BlockGeometry(2, 2, 64, BLOCK_SIZE)
    codec = PlainCodec(torch.bfloat16)
    storage = Storage(codec, geometry, count, device)
    host = Storage(codec, geometry, count, torch.device("cpu"), pinned=device.type == "cuda")
    storage.memory.copy_(torch.randint(255, storage.memory.shape, dtype=torch.uint8))
    before = storage.blocks.clone()
    order = torch.randperm(count).tolist()
    copy_blocks(storage, host, list(zip(range(count), order, strict=True)))
    storage.memory.zero_()
    copy_blocks(host, storage, list(zip(order, range(count), strict=True)))
    yield _truth("swap out and in", f"{count} blocks", bool(torch.equal(storage.blocks, before)))
