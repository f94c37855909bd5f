"""The same as footprint.py for a model on a GPU: weights as they are, fused kernels, CUDA graphs."""

import math

import torch

from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom.ops.gpu.decode_splits import split_count
from kvloom.ops.gpu.linear_splits import max_parts_bytes
from kvloom.ops.linear_groups import GROUP, unpacked_bytes

SAMPLER_LOGITS = 6
"""Matrices of 4 bytes [R, vocab] that sampling holds at most: the logits, an edited copy, and those that torch's sort
takes where a row asks for more than sampling on its own does."""

_MULTIPROCESSORS = 304
"""Of the largest GPU there is (MI300X): the more there are, the more parts sequences are divided into."""


def weights_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype) -> int:
    """Bytes of the weights and of the rotary table. A head that is also the embedding is there once.

    Args:
        spec: the model's shape.
        weights: fp32, bf16, int8 or int4.
        dtype: of activations and of plain weights.
    """
    assert weights in ("fp32", "bf16", "int8", "int4")
    rotary = spec.context_length * spec.head_dim * torch.float32.itemsize

    def size(name: str, shape: tuple[int, ...]) -> int:
        if len(shape) == 1 or weights in ("fp32", "bf16"):
            return math.prod(shape) * dtype.itemsize
        if name == "embed_tokens.weight" and not spec.tied_embeddings:
            return unpacked_bytes(shape[0], shape[1])
        table = name in ("embed_tokens.weight", "lm_head.weight")
        return quantized_bytes(shape[0], shape[1], 8 if table or weights == "int8" else 4)

    return sum(size(name, shape) for name, shape in tensor_shapes(spec).items()) + rotary


def quantized_bytes(out_features: int, in_features: int, bits: int) -> int:
    """Bytes of a weight in ``ops.gpu.linear.QuantizedLinear``; with 4 bits, of one with minima, the larger form."""
    block = GROUP * 16 // bits
    beside = 2 if bits == 8 else 4
    return out_features * -(-in_features // block) * (2 * GROUP + block // GROUP * beside)


def products_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Bytes that the CUDA graphs of decode steps keep: the largest one's tensors, which the others share.

    Args:
        spec: the model's shape.
        weights: as of ``weights_bytes``.
        dtype: of activations.
        tokens: maximum number of tokens in a step; no more rows than that are decoded.
        rows: maximum number of sequences in a step.
    """
    return step_bytes(spec, weights, dtype, dtype.itemsize, min(tokens, rows), rows, spec.context_length)


def step_bytes(
    spec: ModelSpec, weights: str, dtype: torch.dtype, kv_dtype_bytes: int, tokens: int, rows: int, length: int
) -> int:
    """Bytes of the largest step's tensors, cache and weights aside; arguments as of footprint.py's.

    The kernels read keys and values where they lie, so the cache's dtype does not matter; nor do the weights, whose
    products are all of the same form; nor does the length, since they are launched as for the longest.
    """
    fp32, size = torch.float32.itemsize, dtype.itemsize
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # residual before and after an addition, its normalized form and the layer's update
    stream = tokens * spec.hidden_size * (2 * fp32 + 2 * size)
    qkv = tokens * (heads_out + 2 * kv_out) * size
    # rotated queries and the result; each part's sums and its scores' logarithm of decodes
    parts = max(
        batch * split_count(batch, spec.n_kv_heads, spec.context_length, _MULTIPROCESSORS)
        for batch in range(1, rows + 1)
    )
    attention = 2 * tokens * heads_out * size + parts * spec.n_heads * (spec.head_dim + 1) * fp32
    # gate and up, and what becomes of them
    mlp = 3 * tokens * spec.intermediate_size * size
    logits = rows * spec.vocab_size * SAMPLER_LOGITS * fp32
    return max(stream + qkv + attention, stream + mlp, stream + logits) + max_parts_bytes(_MULTIPROCESSORS)
