"""How much memory a model takes on a CPU: the decoder's weights, compiled products and the tensors of a step."""

import torch

from kvloom.models.spec import ModelSpec
from kvloom.ops.attention import attention_bytes
from kvloom.ops.linear_float import kernels_bytes, packed_bytes, packed_dtype
from kvloom.ops.linear_groups import GROUP, grouped_bytes, unpacked_bytes
from kvloom.ops.linear_int8 import WIDE_GROUP
from kvloom.ops.native import is_buildable

SAMPLER_LOGITS = 3
"""The most fp32 matrices [R, vocab] that sampling in C++ holds: the logits, which are edited in place; a copy of the
finite ones if some are not finite; and a copy of those that are sampled."""

TORCH_SAMPLER_LOGITS = 9
"""The same for sampling in torch. It also holds each score's distance from the maximum, the distances to sort, the
sorted distances, and the weights and their cumulative sums, which have 8 bytes each."""

_PLAIN = ("fp32", "bf16")
"""Values of the setting ``weights`` that do not quantize."""

_SCRATCH = 12
"""Bytes per vocabulary entry that each thread keeps for sampling in C++: a distance and a rank."""


def weights_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype) -> int:
    """Bytes of the loaded weights and of the rotary table.

    Args:
        spec: the model's shape.
        weights: fp32, bf16, int8, int4 or w8a8, see ``weight_conversion.ServedWeights``.
        dtype: dtype of activations and of plain weights.
    """
    native = is_buildable()

    def plain(shape: tuple[int, int]) -> int:
        return packed_bytes(*shape, dtype if native else packed_dtype(dtype))

    def grouped(shape: tuple[int, int], bits: int, group: int = GROUP) -> int:
        return grouped_bytes(*shape, bits, group=group) if native else plain(shape)

    def product(shape: tuple[int, int]) -> int:
        if not quantized:
            return plain(shape)
        return grouped(shape, 4 if weights == "int4" else 8, WIDE_GROUP if weights == "w8a8" else GROUP)

    quantized = weights not in _PLAIN
    table = spec.vocab_size, spec.hidden_size
    layer = sum(product(shape) for shape in _layer_shapes(spec).values())
    norms = (2 * spec.n_layers + 1) * spec.hidden_size * dtype.itemsize
    head = grouped(table, 8) if quantized else plain(table)
    embedding = 0
    if quantized and not spec.tied_embeddings:
        embedding = grouped_bytes(*table, 8) if native else unpacked_bytes(*table)
    elif not (native and spec.tied_embeddings):
        embedding = table[0] * table[1] * dtype.itemsize
    rotary = spec.context_length * spec.head_dim * torch.float32.itemsize
    return spec.n_layers * layer + norms + embedding + head + rotary


def products_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype, tokens: int, rows: int) -> int:
    """Bytes of products compiled at run time; for the arguments see ``step_bytes``.

    There are none with the C++ ops, which are compiled ahead of time.
    """
    if is_buildable():
        return 0
    layer = [columns for _, columns in _layer_shapes(spec).values()]
    return kernels_bytes([*layer, spec.hidden_size], packed_dtype(dtype))


def _layer_shapes(spec: ModelSpec) -> dict[str, tuple[int, int]]:
    """Shapes [out, in] of the weights of a layer's products."""
    hidden, mlp, heads_out = spec.hidden_size, spec.intermediate_size, spec.n_heads * spec.head_dim
    qkv_out = heads_out + 2 * spec.n_kv_heads * spec.head_dim
    return {
        "qkv": (qkv_out, hidden),
        "attention_out": (hidden, heads_out),
        "gate_up": (2 * mlp, hidden),
        "down": (hidden, mlp),
    }


def step_bytes(
    spec: ModelSpec, weights: str, dtype: torch.dtype, kv_dtype_bytes: int, tokens: int, rows: int, length: int
) -> int:
    """Bytes of the largest step's tensors, without the cache and the weights.

    Args:
        spec: the model's shape.
        weights: see ``weights_bytes``.
        dtype: dtype of activations.
        kv_dtype_bytes: bytes of one number in the cache.
        tokens: maximum number of tokens in a step.
        rows: maximum number of sequences in a step; each needs one row of logits.
        length: the longest sequence in tokens.
    """
    fp32, size = torch.float32.itemsize, dtype.itemsize
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # the residual before and after an addition, its normalized form in fp32 and dtype, and the layer's update
    stream = tokens * spec.hidden_size * (3 * fp32 + 2 * size)
    qkv = tokens * (heads_out + 2 * kv_out) * size
    # queries and keys in fp32, their products with cosine and sine, and the rotated queries and keys
    rotary = 3 * tokens * (heads_out + kv_out) * fp32
    attention = tokens * heads_out * size
    if is_buildable():
        attention += tokens * heads_out * size
    else:
        attention += attention_bytes(
            min(tokens, length), length, spec.n_heads, spec.n_kv_heads, spec.head_dim, size, kv_dtype_bytes
        )
    mlp = tokens * _mlp_numbers(spec, weights) * size
    held = SAMPLER_LOGITS if is_buildable() else TORCH_SAMPLER_LOGITS
    logits = rows * spec.vocab_size * max(held * fp32, size + fp32)
    kept = recorded_bytes(spec, weights, dtype, rows) if is_buildable() else 0
    return kept + max(stream + qkv + max(rotary, attention), stream + mlp, stream + logits)


def _mlp_numbers(spec: ModelSpec, weights: str) -> int:
    """Numbers that a token has between the MLP's two products.

    They are gate and up, unless they are never stored, and their activated product. In torch the activated gate is
    stored, too.
    """
    native = 1 if weights in (*_PLAIN, "w8a8") else 3
    return (native if is_buildable() else 4) * spec.intermediate_size


def recorded_bytes(spec: ModelSpec, weights: str, dtype: torch.dtype, rows: int) -> int:
    """Bytes of the tensors that recorded decode steps in C++ keep; for the arguments see ``step_bytes``.

    While a layer's result is computed, the previous layer's result still exists: the same variable holds it.
    """
    heads_out, kv_out = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    # the normalized residual, a layer's update and the update before it
    hidden = 3 * spec.hidden_size
    qkv = 2 * (heads_out + 2 * kv_out)
    # queries, attention, and the attention or the queries of the layer before
    attention = 3 * heads_out
    mlp = _mlp_numbers(spec, weights)
    # the residual before and after an addition and the logits; the argmax token and its validity flag
    in_full = (2 * spec.hidden_size + spec.vocab_size) * torch.float32.itemsize + torch.int64.itemsize + 1
    return rows * ((hidden + qkv + attention + mlp) * dtype.itemsize + in_full)


def scratch_bytes(spec: ModelSpec, threads: int) -> int:
    """Bytes of scratch memory that this many threads keep between steps."""
    return threads * spec.vocab_size * _SCRATCH if is_buildable() else 0
