"""The same as footprint.py for a model on a GPU: plain weights, fused kernels, CUDA graphs."""

import math

import torch

from kvloom.models.spec import ModelSpec, tensor_shapes

SAMPLER_LOGITS = 6
"""Matrices of 4 bytes [R, vocab] that sampling holds at most: the logits, an edited copy, and those that torch's sort
takes where a row asks for more than sampling on its own does."""

_SPLITS = 32
"""Parts of a sequence that decode attention sums on their own and then merges: at most, but for a few long sequences,
which the headroom has room for."""


def weights_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype) -> int:
    """Bytes of the weights, as they are, and of the rotary table. A head that is also the embedding is there once."""
    assert weights in ("fp32", "bf16")
    rotary = spec.context_length * spec.head_dim * torch.float32.itemsize
    return sum(map(math.prod, tensor_shapes(spec).values())) * dtype.itemsize + rotary


def products_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Bytes that the CUDA graphs of decode steps keep: the largest one's tensors, which the others share.

    Args:
        spec: the model's shape.
        dtype: of activations.
        tokens: most tokens in a step; no more rows than that are decoded.
        rows: most sequences in a step.
    """
    return step_bytes(spec, dtype, dtype.itemsize, min(tokens, rows), rows, spec.context_length)


def step_bytes(spec: ModelSpec, dtype: torch.dtype, kv_dtype_bytes: int, tokens: int, rows: int, length: int) -> int:
    """Bytes of the largest step's tensors, cache and weights aside; arguments as of footprint.py's.

    The kernels read keys and values where they lie, so neither the cache's dtype nor the length matters.
    """
    fp32, size = torch.float32.itemsize, dtype.itemsize
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # residual before and after an addition, its normalized form and the layer's update
    stream = tokens * spec.hidden_size * (2 * fp32 + 2 * size)
    qkv = tokens * (heads_out + 2 * kv_out) * size
    # rotated queries and the result; each part's sums and its scores' logarithm of decodes
    attention = 2 * tokens * heads_out * size + rows * spec.n_heads * _SPLITS * (spec.head_dim + 1) * fp32
    # gate and up, and what becomes of them
    mlp = 3 * tokens * spec.intermediate_size * size
    logits = rows * spec.vocab_size * SAMPLER_LOGITS * fp32
    return max(stream + qkv + attention, stream + mlp, stream + logits)
