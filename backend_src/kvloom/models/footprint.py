"""How many bytes a model takes: its weights as the decoder keeps them, compiled products, a step's tensors."""

import torch

from kvloom.models.spec import ModelSpec
from kvloom.ops.attention import attention_bytes
from kvloom.ops.linear import kernels_bytes, packed_bytes
from kvloom.ops.native import find_compiler

SAMPLER_LOGITS = 9
"""fp32 matrices [R, vocab] that sampling holds at most: the logits, an edited copy, the scaled copy, its rows that have
to be sorted, these sorted, and their probabilities and running sums in fp64."""


def weights_bytes(spec: ModelSpec, dtype: torch.dtype) -> int:
    """Bytes of the loaded weights and of the rotary table.

    A head is packed for its product; where the embedding is also the head it is there twice, once as it is.
    """
    hidden = spec.hidden_size
    layer = sum(packed_bytes(*shape, dtype) for shape in _layer_shapes(spec))
    norms = (2 * spec.n_layers + 1) * hidden * dtype.itemsize
    embedding = spec.vocab_size * hidden * dtype.itemsize
    head = packed_bytes(spec.vocab_size, hidden, dtype)
    rotary = spec.context_length * spec.head_dim * torch.float32.itemsize
    return spec.n_layers * layer + norms + embedding + head + rotary


def products_bytes(spec: ModelSpec, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Bytes of compiled products, which gather while a server runs; arguments as of ``step_bytes``.

    The products in C++ are compiled before.
    """
    if find_compiler() is not None:
        return 0
    layer = [(columns, tokens) for _, columns in _layer_shapes(spec)]
    return kernels_bytes([*layer, (spec.hidden_size, rows)], dtype)


def _layer_shapes(spec: ModelSpec) -> tuple[tuple[int, int], ...]:
    """[out, in] of a layer's products: queries, keys and values; attention's output; gate and up; down."""
    hidden, mlp, heads_out = spec.hidden_size, spec.intermediate_size, spec.n_heads * spec.head_dim
    qkv_out = heads_out + 2 * spec.n_kv_heads * spec.head_dim
    return (qkv_out, hidden), (hidden, heads_out), (2 * mlp, hidden), (hidden, mlp)


def step_bytes(spec: ModelSpec, dtype: torch.dtype, kv_dtype_bytes: int, tokens: int, rows: int, length: int) -> int:
    """Bytes of the largest step's tensors, cache and weights aside.

    Args:
        spec: the model's shape.
        dtype: of activations.
        kv_dtype_bytes: size of a cached number.
        tokens: most tokens in a step.
        rows: most sequences in a step, whose logits are wanted.
        length: longest sequence in tokens.
    """
    fp32, size = torch.float32.itemsize, dtype.itemsize
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # residual before and after an addition, its normalized form in fp32 and dtype, and the layer's update
    stream = tokens * spec.hidden_size * (3 * fp32 + 2 * size)
    qkv = tokens * (heads_out + 2 * kv_out) * size
    # queries and keys in fp32, their products with cosine and sine, and the rotated ones
    rotary = 3 * tokens * (heads_out + kv_out) * fp32
    attention = tokens * heads_out * size
    if find_compiler() is not None:
        attention += tokens * heads_out * size
    else:
        attention += attention_bytes(
            min(tokens, length), length, spec.n_heads, spec.n_kv_heads, spec.head_dim, size, kv_dtype_bytes
        )
    # gate and up, the activated gate, its product with up
    mlp = 4 * tokens * spec.intermediate_size * size
    logits = rows * spec.vocab_size * max(SAMPLER_LOGITS * fp32, size + fp32)
    return max(stream + qkv + max(rotary, attention), stream + mlp, stream + logits)
