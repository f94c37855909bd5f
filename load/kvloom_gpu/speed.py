"""Speed of single kernels: as a share of a copy's bandwidth, and compared with torch's kernels on the same shapes."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

from kvloom.executor.step_buffers import SamplingTensors
from kvloom.kv.codec import LayerCache
from kvloom.ops.activation import silu_mul
from kvloom.ops.attention import paged_attention
from kvloom.ops.gpu.linear import QuantizedLinear
from kvloom.ops.kv_write import rope_kv_write
from kvloom.ops.linear import Linear, pack_linear
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.sampling import sample_tokens
from kvloom_gpu.bench import Clock
from kvloom_gpu.launches import BLOCK_SIZE
from kvloom_gpu.models import greedy_draws, storage_for
from kvloom_gpu.sizes import Sizes

COLD_BYTES = 256 << 20
"""Inputs rotate through at least this much memory, several times the L2 cache."""


@torch.inference_mode()
def rows(sizes: Sizes, clock: Clock, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Decode attention, prefill attention, then the small kernels."""
    dtype = torch.bfloat16 if sizes.device.type == "cuda" else torch.float32
    for count, length in sizes.decodes:
        yield _decode(sizes, clock, bandwidth, dtype, count, length)
    for chunk, before in sizes.prefills:
        yield _prefill(sizes, clock, dtype, chunk, before)
    for count in sorted({count for count, _ in sizes.decodes}):
        yield from _small(sizes, clock, bandwidth, dtype, count)
        yield from _products(sizes, clock, bandwidth, dtype, count)


def _layers(sizes: Sizes, dtype: torch.dtype, tokens: int) -> tuple[list[LayerCache], int]:
    """Random caches of ``tokens`` tokens each, in more layers than fit into the L2 cache, and their block count."""
    shape = sizes.model
    token_bytes = 2 * shape.n_kv_heads * shape.head_dim * dtype.itemsize
    count = 1
    if sizes.device.type == "cuda":
        free = torch.cuda.mem_get_info(sizes.device)[0]
        count = max(1, min(32, -(-COLD_BYTES // (tokens * token_bytes)), int(free * 0.6) // (tokens * token_bytes)))
    blocks = tokens // BLOCK_SIZE
    layers = storage_for(shape.spec(layers=count), dtype, blocks, sizes.device).layers
    for layer in layers:
        for cache in layer:
            cache.normal_()
    return layers, blocks


def _decode(
    sizes: Sizes, clock: Clock, bandwidth: float, dtype: torch.dtype, count: int, length: int
) -> dict[str, Any]:
    device, shape = sizes.device, sizes.model
    each = -(-length // BLOCK_SIZE)
    layers, blocks = _layers(sizes, dtype, count * each * BLOCK_SIZE)
    width = -(-each // 16) * 16
    tables = torch.zeros(count, width, dtype=torch.int32, device=device)
    tables[:, :each] = torch.randperm(blocks, device=device).int().view(count, each)
    starts = torch.arange(count + 1, dtype=torch.int32, device=device)
    lengths = torch.full((count,), length, dtype=torch.int32, device=device)
    q = torch.randn(count, shape.n_heads, shape.head_dim, device=device).to(dtype)

    def attend(layer: LayerCache) -> Callable[[], object]:
        return lambda: paged_attention(
            q, *layer, tables, starts, lengths, shape.head_dim**-0.5, max_queries=1, max_length=length
        )

    seconds = clock.seconds([attend(layer) for layer in layers])
    moved = 2 * count * length * shape.n_kv_heads * shape.head_dim * dtype.itemsize
    row = {
        "kernel": "decode attention",
        "shape": f"{shape.name}, {count} x {length}",
        "us": seconds * 1e6,
        "gb_s": moved / seconds / 1e9,
        "share_of_copy": moved / seconds / bandwidth,
    }
    del layers
    if sizes.peers:
        row |= _peer("sdpa", lambda: _sdpa_decode(sizes, clock, dtype, count, length))
    return row


def _sdpa_decode(sizes: Sizes, clock: Clock, dtype: torch.dtype, count: int, length: int) -> float:
    """torch's attention over a contiguous cache, without the work of paging."""
    device, shape = sizes.device, sizes.model
    size = 2 * count * length * shape.n_kv_heads * shape.head_dim * dtype.itemsize
    sets = max(1, min(8, COLD_BYTES // size)) if device.type == "cuda" else 1
    q = torch.randn(count, shape.n_heads, 1, shape.head_dim, device=device).to(dtype)

    def pair() -> tuple[torch.Tensor, torch.Tensor]:
        k, v = (torch.empty(count, shape.n_kv_heads, length, shape.head_dim, device=device, dtype=dtype) for _ in "kv")
        return k.normal_(), v.normal_()

    def attend(k: torch.Tensor, v: torch.Tensor) -> Callable[[], object]:
        return lambda: sdpa(q, k, v, enable_gqa=True)

    return clock.seconds([attend(*pair()) for _ in range(sets)])


def _prefill(sizes: Sizes, clock: Clock, dtype: torch.dtype, chunk: int, before: int) -> dict[str, Any]:
    device, shape, length = sizes.device, sizes.model, chunk + before
    each = -(-length // BLOCK_SIZE)
    layers, blocks = _layers(sizes, dtype, each * BLOCK_SIZE)
    tables = torch.zeros(1, -(-each // 16) * 16, dtype=torch.int32, device=device)
    tables[0, :each] = torch.randperm(blocks, device=device).int()
    starts = torch.tensor([0, chunk], dtype=torch.int32, device=device)
    lengths = torch.tensor([length], dtype=torch.int32, device=device)
    q = torch.randn(chunk, shape.n_heads, shape.head_dim, device=device).to(dtype)

    def attend(layer: LayerCache) -> Callable[[], object]:
        return lambda: paged_attention(
            q, *layer, tables, starts, lengths, shape.head_dim**-0.5, max_queries=chunk, max_length=length
        )

    seconds = clock.seconds([attend(layer) for layer in layers[:4]])
    seen = chunk * before + chunk * (chunk + 1) / 2
    row = {
        "kernel": "prefill attention",
        "shape": f"{shape.name}, {chunk} after {before}",
        "us": seconds * 1e6,
        "tflop_s": 4 * seen * shape.n_heads * shape.head_dim / seconds / 1e12,
    }
    if sizes.peers:
        q_dense, k, v = (
            torch.randn(1, heads, tokens, shape.head_dim, device=device).to(dtype)
            for heads, tokens in ((shape.n_heads, chunk), (shape.n_kv_heads, length), (shape.n_kv_heads, length))
        )
        if not before:
            row |= _peer("sdpa", lambda: clock.seconds([lambda: sdpa(q_dense, k, v, is_causal=True, enable_gqa=True)]))
        elif device.type == "cuda":
            row |= _peer("flex", lambda: _flex(clock, q_dense, k, v))
    return row


def _flex(clock: Clock, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> float:
    """Compiled FlexAttention of a sequence's last queries with a causal mask."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    chunk, length = q.shape[2], k.shape[2]
    before = length - chunk
    mask = create_block_mask(lambda b, h, i, j: j <= i + before, None, None, chunk, length, device=str(q.device))
    attend = torch.compile(flex_attention, dynamic=False)
    return clock.seconds([lambda: attend(q, k, v, block_mask=mask, enable_gqa=True)])


def _small(sizes: Sizes, clock: Clock, bandwidth: float, dtype: torch.dtype, count: int) -> Iterator[dict[str, Any]]:
    """The ops between the products of a decode step of ``count`` sequences. Caches do not matter for them."""
    device, shape, size = sizes.device, sizes.model, dtype.itemsize
    hidden, mlp = shape.hidden, shape.intermediate
    residual = torch.randn(count, hidden, device=device)
    update = torch.randn(count, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    gate_up = torch.randn(count, 2 * mlp, device=device).to(dtype)
    heads = shape.n_heads + 2 * shape.n_kv_heads
    qkv = torch.randn(count, heads * shape.head_dim, device=device).to(dtype)
    table = torch.randn(64, shape.head_dim, device=device)
    place = torch.arange(count, device=device)
    [layer] = storage_for(shape.spec(), dtype, count // BLOCK_SIZE + 1, device).layers
    logits = torch.randn(count, sizes.vocab, device=device)
    greedy = SamplingTensors(*(tensor.to(device) for tensor in greedy_draws(count).tensors))
    drawn = SamplingTensors(greedy.top_p, greedy.min_p, greedy.top_k * 50, greedy.top_p * 0.9, greedy.uniform + 0.5)
    works: dict[str, tuple[Callable[[], object], int]] = {
        "norm": (lambda: add_rms_norm(residual, update, weight, 1e-5), count * hidden * (8 + 2 * size)),
        "activation": (lambda: silu_mul(gate_up), count * mlp * 3 * size),
        "rope and cache write": (
            lambda: rope_kv_write(qkv, table, place % 64, place, *layer),
            2 * count * heads * shape.head_dim * size,
        ),
        "greedy choice": (lambda: sample_tokens(logits, *greedy.tensors), count * sizes.vocab * 4),
        "top-k and top-p": (lambda: sample_tokens(logits, *drawn.tensors), 2 * count * sizes.vocab * 4),
    }
    for name, (work, moved) in works.items():
        seconds = clock.seconds([work] * 4)
        yield {
            "kernel": name,
            "shape": f"{shape.name}, {count} rows",
            "us": seconds * 1e6,
            "gb_s": moved / seconds / 1e9,
            "share_of_copy": moved / seconds / bandwidth,
        }


def _products(sizes: Sizes, clock: Clock, bandwidth: float, dtype: torch.dtype, count: int) -> Iterator[dict[str, Any]]:
    """The largest product of a layer, with bf16, 8-bit and 4-bit weights. Several weights, so that none is cached."""
    device, width = sizes.device, sizes.model.hidden
    out_features = 2 * sizes.model.intermediate
    x = torch.randn(count, width, device=device).to(dtype)

    def plain() -> Linear:
        return pack_linear(torch.randn(out_features, width, device=device).to(dtype))

    def quantized(bits: int, group: int, minima: bool) -> Linear:
        values = torch.randint(0, 128 if bits == 8 else 16, (out_features, width), device=device, dtype=torch.uint8)
        scales = torch.rand(out_features, -(-width // group), device=device).half()
        values = values.view(torch.int8) if bits == 8 else values
        return QuantizedLinear(bits, values, scales, scales if minima else None, group)

    kinds: list[tuple[str, Callable[[], Linear], float]] = [("plain", plain, 8.0 * dtype.itemsize)]
    for bits, group, minima in ((8, 32, False), (4, 32, False), (4, 32, True), (4, 128, True)):
        name = f"int{bits} by {group}{' and minima' if minima else ''}"
        kinds.append((name, partial(quantized, bits, group, minima), bits + (16 + 16 * minima) / group))
    for name, make, bits_each in kinds:
        moved = int(out_features * width * bits_each / 8)
        products = [make() for _ in range(-(-COLD_BYTES // moved) if device.type == "cuda" else 1)]
        seconds = clock.seconds([partial(product, x) for product in products])
        yield {
            "kernel": f"product, {name}",
            "shape": f"{out_features} x {width}, {count} rows",
            "us": seconds * 1e6,
            "gb_s": moved / seconds / 1e9,
            "share_of_copy": moved / seconds / bandwidth,
        }


def _peer(name: str, measure: Callable[[], float]) -> dict[str, Any]:
    """A peer's time. If the peer fails, its row has the reason."""
    try:
        return {f"{name}_us": measure() * 1e6}
    except Exception as error:  # noqa: BLE001 a peer's error must not end the check
        return {f"{name}_error": str(error)[:200]}
