"""Whole steps: a toy model's tokens with and without graphs, and an 8B model's decode steps against their floor."""

import math
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from kvloom.executor.gpu_step import GpuStep
from kvloom.executor.graphs import CudaRecorder, Record
from kvloom.models.decoder import Decoder
from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom_gpu.bench import Clock
from kvloom_gpu.launches import BLOCK_SIZE, CPU, triton_everywhere
from kvloom_gpu.models import batch_of, greedy_draws, random_decoder, storage_for
from kvloom_gpu.sizes import Sizes


def toy_rows(sizes: Sizes) -> Iterator[dict[str, Any]]:
    """Compare a random fp32 model's greedy tokens with graphs, without graphs, and with the torch ops on the CPU."""
    spec, device = sizes.toy.spec(layers=2, vocab=min(sizes.vocab, 512)), sizes.device
    with triton_everywhere(False):
        expected = _generate(sizes, random_decoder(spec, torch.float32, CPU), None, CPU)
    decoder = random_decoder(spec, torch.float32, device, made_on=CPU)
    for name, record in (("graphs", _recorder(device)), ("no graphs", None)):
        tokens = _generate(sizes, decoder, record, device)
        equal = sum(a == b for a, b in zip(tokens, expected, strict=True))
        yield {
            "check": f"toy tokens, {name}",
            "shape": sizes.toy.name,
            "ok": tokens == expected,
            "detail": f"{equal} of {len(expected)} sequences equal the CPU's",
        }


def _recorder(device: torch.device) -> Record:
    if device.type == "cuda":
        return CudaRecorder()

    def record(work: Any) -> Any:
        work()
        return work

    return record


def _generate(sizes: Sizes, decoder: Decoder, record: Record | None, device: torch.device) -> list[list[int]]:
    """Compute prompts in two chunks together with other sequences' decodes, then decode all together."""
    count = sizes.toy_sequences
    prompts = [[(7 * i + 3 * j) % 200 for j in range(9 + 2 * i)] for i in range(count)]
    most = max(map(len, prompts)) + sizes.toy_tokens + 2 * count
    each = -(-most // BLOCK_SIZE)
    storage = storage_for(decoder.spec, torch.float32, count * each, device)
    step = GpuStep(decoder, storage.layers, 64, count + 1, each * BLOCK_SIZE, device)
    if record is not None:
        step.record_graphs(record)
    tables = [[count * block + i for block in range(each)] for i in range(count)]
    known, computed = [list(prompt) for prompt in prompts], [0] * count

    def advance(limits: dict[int, int]) -> None:
        """Compute some sequences up to these numbers of tokens."""
        parts = {i: known[i][computed[i] : computed[i] + limit] for i, limit in limits.items()}
        ends = {i: computed[i] + len(part) for i, part in parts.items()}
        batch = batch_of(list(parts.values()), list(ends.values()), [tables[i] for i in parts])
        for i, token in zip(parts, step.run(batch, greedy_draws(len(parts))), strict=True):
            computed[i] = ends[i]
            if computed[i] == len(known[i]):
                known[i].append(token)

    for i in range(count):
        advance({**dict.fromkeys(range(i), 1), i: 6})
        advance({**dict.fromkeys(range(i), 1), i: 1000})
    for _ in range(sizes.toy_tokens):
        advance(dict.fromkeys(range(count), 1))
    return [tokens[len(prompt) :] for tokens, prompt in zip(known, prompts, strict=True)]


@torch.inference_mode()
def step_rows(sizes: Sizes, clock: Clock, bandwidth: float) -> Iterator[dict[str, Any]]:
    """Time decode steps of a large random model in bf16, as graphs: on the device, and including the host.

    The floor is the time to read weights and cache once at the copy's bandwidth. Sequences share blocks if the cache
    does not fit into memory. At these sizes no block is still in the L2 cache when it is read again.
    """
    device = sizes.device
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    context = max(length for _, length in sizes.decodes) + BLOCK_SIZE
    most = max(count for count, _ in sizes.decodes)
    spec = sizes.model.spec(layers=sizes.layers, vocab=sizes.vocab, context=context)
    decoder = random_decoder(spec, dtype, device)
    block_bytes = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * BLOCK_SIZE * dtype.itemsize
    needed = max(count * -(-length // BLOCK_SIZE) for count, length in sizes.decodes)
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
    blocks = min(needed, int(free * sizes.pool_share) // block_bytes) if free else needed
    storage = storage_for(spec, dtype, blocks, device)
    if device.type == "cuda":
        # Not zeros, which need less power and time
        for layer in storage.layers:
            for cache in layer:
                cache.normal_()
    step = GpuStep(decoder, storage.layers, 64, most, context, device)
    step.record_graphs(_recorder(device))
    weights = _product_weights(spec) * dtype.itemsize
    for count, length in sizes.decodes:
        each = -(-length // BLOCK_SIZE)
        order = torch.randperm(blocks).repeat(-(-count * each // blocks))[: count * each].tolist()
        tables = [order[row * each : (row + 1) * each] for row in range(count)]
        batch = batch_of([[1]] * count, [length] * count, tables)
        draws = greedy_draws(count)
        tokens = step.run(batch, draws)
        size = step._graph_size(batch)
        assert size is not None and step._graphs is not None
        device_s = clock.launched_seconds(partial(step._graphs.replay, size))
        whole_s = clock.waited_seconds(partial(step.run, batch, draws))
        kv_bytes = count * length * block_bytes / BLOCK_SIZE
        floor_s = (weights + kv_bytes) / bandwidth
        yield {
            "step": "decode",
            "model": f"{sizes.model.name}, {sizes.layers} layers",
            "sequences": count,
            "length": length,
            "device_ms": device_s * 1e3,
            "whole_ms": whole_s * 1e3,
            "floor_ms": floor_s * 1e3,
            "share_of_floor": floor_s / device_s,
            "tokens_per_s": count / whole_s,
            "ok": all(token >= 0 for token in tokens),
        }


def _product_weights(spec: ModelSpec) -> int:
    """The number of weights that a step multiplies: every layer's products and the head, but not the embedding."""
    shapes = tensor_shapes(spec)
    head = math.prod(shapes["embed_tokens.weight"])
    return head + sum(math.prod(shape) for name, shape in shapes.items() if name.endswith("_proj.weight"))
