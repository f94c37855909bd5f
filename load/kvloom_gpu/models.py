"""Random models on a device, their caches, and batches for them."""

import torch

from kvloom.executor.step_buffers import SamplingTensors
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Batch, Decoder
from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom_gpu.launches import BLOCK_SIZE


def random_decoder(
    spec: ModelSpec, dtype: torch.dtype, device: torch.device, made_on: torch.device | None = None
) -> Decoder:
    """A model whose activations stay of order one.

    Args:
        spec: the model's shape.
        dtype: the dtype of its weights.
        device: the device of the model.
        made_on: the device that draws the random numbers, which depend on it; None for ``device``.
    """
    made_on = device if made_on is None else made_on
    generator = torch.Generator(made_on).manual_seed(0)
    tensors = {}
    for name, shape in tensor_shapes(spec).items():
        weight = torch.randn(shape, generator=generator, device=made_on, dtype=dtype)
        tensors[name] = 1 + 0.1 * weight if len(shape) == 1 else weight.mul_(1.5 * shape[1] ** -0.5)
    return Decoder(spec, tensors, dtype, device)


def storage_for(spec: ModelSpec, dtype: torch.dtype, blocks: int, device: torch.device) -> Storage:
    """A cache with this number of blocks."""
    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, BLOCK_SIZE)
    return Storage(PlainCodec(dtype), geometry, blocks, device)


def batch_of(tokens: list[list[int]], ends: list[int], tables: list[list[int]]) -> Batch:
    """A step on the host.

    Args:
        tokens: the tokens of each sequence that are computed.
        ends: how long each sequence is with them.
        tables: each sequence's blocks; at least those of its tokens.
    """
    counts = [len(some) for some in tokens]
    width = max(map(len, tables))
    positions = [range(end - count, end) for count, end in zip(counts, ends, strict=True)]
    slots = [
        table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE
        for table, some in zip(tables, positions, strict=True)
        for position in some
    ]
    starts = torch.tensor([0, *counts]).cumsum(0)
    return Batch(
        tokens=torch.tensor([token for some in tokens for token in some]),
        positions=torch.tensor([position for some in positions for position in some]),
        slots=torch.tensor(slots),
        query_starts=starts.int(),
        seq_lens=torch.tensor(ends, dtype=torch.int32),
        block_tables=torch.tensor([table + [0] * (width - len(table)) for table in tables], dtype=torch.int32),
        logit_rows=starts[1:] - 1,
        max_queries=max(counts),
        max_length=max(ends),
    )


def greedy_draws(rows: int) -> SamplingTensors:
    """Take the most likely token of each row."""
    zeros, ones = torch.zeros(rows), torch.ones(rows)
    return SamplingTensors(zeros, zeros, ones.long(), ones, zeros.double())
