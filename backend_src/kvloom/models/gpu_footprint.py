"""How much memory a model takes on a GPU: weights, the tensors of fused kernels, CUDA graphs."""

import math

import torch

from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom.ops.gpu.decode_splits import split_count
from kvloom.ops.gpu.linear_splits import max_parts_bytes
from kvloom.ops.linear_groups import GROUP, unpacked_bytes

SAMPLER_LOGITS = 6
"""The most 4-byte matrices [R, vocab] that sampling holds: the logits, an edited copy, and the matrices of torch's
sort, which runs for rows that the fused sampling kernels do not handle."""

_MULTIPROCESSORS = 304
"""The number on the largest GPU (MI300X). Attention splits sequences into more parts if there are more."""


def weights_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype) -> int:
    """Bytes of the weights and of the rotary table. A tied embedding counts once.

    Args:
        spec: the model's shape.
        weights: fp32, bf16, int8 or int4.
        dtype: dtype of activations and of plain weights.
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
    """Bytes of a weight in ``ops.gpu.linear.QuantizedLinear``. With 4 bits it has minima, the larger form."""
    block = GROUP * 16 // bits
    beside = 2 if bits == 8 else 4
    return out_features * -(-in_features // block) * (2 * GROUP + block // GROUP * beside)


def products_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Bytes that the CUDA graphs of decode steps keep. All graphs share the tensors of the largest one.

    Args:
        spec: the model's shape.
        weights: see ``weights_bytes``.
        dtype: dtype of activations.
        tokens: maximum number of tokens in a step, and so of sequences in a decode step.
        rows: maximum number of sequences in a step.
    """
    return step_bytes(spec, weights, dtype, dtype.itemsize, min(tokens, rows), rows, spec.context_length)


def step_bytes(
    spec: ModelSpec, weights: str, dtype: torch.dtype, kv_dtype_bytes: int, tokens: int, rows: int, length: int
) -> int:
    """Bytes of the largest step's tensors, without the cache and the weights. For the arguments see footprint.py.

    Three arguments do not matter. ``kv_dtype_bytes``: the kernels read keys and values in place. ``weights``: all
    products need the same tensors. ``length``: every launch is sized for the longest sequence.
    """
    fp32, size = torch.float32.itemsize, dtype.itemsize
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # the residual before and after an addition, its normalized form and the layer's update
    stream = tokens * spec.hidden_size * (2 * fp32 + 2 * size)
    qkv = tokens * (heads_out + 2 * kv_out) * size
    # the rotated queries and the result; for decodes also each part's weighted sum and log-sum-exp
    parts = max(
        batch * split_count(batch, spec.n_kv_heads, spec.context_length, _MULTIPROCESSORS)
        for batch in range(1, rows + 1)
    )
    attention = 2 * tokens * heads_out * size + parts * spec.n_heads * (spec.head_dim + 1) * fp32
    # gate, up and their activated product
    mlp = 3 * tokens * spec.intermediate_size * size
    logits = rows * spec.vocab_size * SAMPLER_LOGITS * fp32
    return max(stream + qkv + attention, stream + mlp, stream + logits) + max_parts_bytes(_MULTIPROCESSORS)
