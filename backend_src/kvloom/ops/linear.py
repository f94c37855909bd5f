"""Matrix products with packed weights of all kinds."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol

import torch

from kvloom.ops.activation import silu_mul
from kvloom.ops.gpu import runs_triton
from kvloom.ops.linear_float import CudaLinear, NativeGatedLinear, NativeLinear, OneDnnLinear
from kvloom.ops.linear_groups import GroupedWeight, NativeGroupedLinear
from kvloom.ops.linear_int8 import Int8Weight, NativeInt8GatedLinear, NativeInt8Linear
from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages

Weight = torch.Tensor | GroupedWeight | Int8Weight
"""A weight [out_features, in_features]: fp32 or bf16, or integers in groups, for plain or for INT8 activations."""


class Linear(Protocol):
    """y = x @ weight.T. On a CPU a row's result does not depend on the number of rows."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in x's dtype or ``out_dtype`` (fp32)."""


class TiedLinear(Linear, Protocol):
    """A head that is also the embedding."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 [T]) of the weight in fp32 [T, in_features]."""


class GatedLinear(Protocol):
    """y = silu(x @ gate.T) * (x @ up.T), the first half of SwiGLU (Shazeer, 2020). For its rows see ``Linear``."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in x's dtype."""


def pack_linear(weight: Weight, dtype: torch.dtype | None = None, allocate: Allocate = small_pages) -> Linear:
    """Pack a weight so that small batches run at memory bandwidth, unlike with torch's plain product.

    On a CPU the product runs in C++ or, without the C++ ops, in oneDNN. On a GPU plain weights use cuBLAS, and weights
    in groups use a Triton kernel.

    Args:
        weight: the weight.
        dtype: dtype of the activations. Without a product for integers the weight is dequantized to it.
        allocate: allocates the packed weight in C++.
    """
    return _pack(weight, dtype, allocate, keep_rows=False)


def pack_tied_linear(weight: Weight, dtype: torch.dtype | None = None, allocate: Allocate = small_pages) -> TiedLinear:
    """Pack an embedding that is also the head. In C++ both share one packed weight."""
    return _pack(weight, dtype, allocate, keep_rows=True)


def pack_gated_linear(
    weight: Weight, dtype: torch.dtype | None = None, allocate: Allocate = small_pages
) -> GatedLinear:
    """Pack the weights of gate and up together, [2 * out_features, in_features], the gate's rows first.

    In C++ plain weights and weights for INT8 activations have a product that applies the activation itself, in fp32.
    With others, gate and up are stored in x's dtype before the activation.

    Args:
        weight: the weight.
        dtype: see ``pack_linear``.
        allocate: allocates the packed weight in C++.
    """
    if isinstance(weight, torch.Tensor) and library(weight) is not None:
        return NativeGatedLinear(weight, allocate)
    if isinstance(weight, Int8Weight) and library() is not None:
        return NativeInt8GatedLinear(weight, allocate)
    return partial(_activated, pack_linear(weight, dtype, allocate))


def _activated(gate_up: Linear, x: torch.Tensor) -> torch.Tensor:
    return silu_mul(gate_up(x))


def _pack(weight: Weight, dtype: torch.dtype | None, allocate: Allocate, keep_rows: bool) -> TiedLinear:
    if isinstance(weight, Int8Weight):
        if library() is not None:
            return NativeInt8Linear(weight, allocate)
        weight = weight.groups
    if isinstance(weight, GroupedWeight):
        if runs_triton(weight.values):
            from kvloom.ops.gpu.linear import QuantizedLinear

            values = weight.values[:, : weight.in_features]
            return QuantizedLinear(weight.bits, values, weight.scales, weight.minima)
        if library() is not None:
            return NativeGroupedLinear(weight, allocate)
        assert dtype is not None
        weight = weight.dequantize().to(dtype)
    if weight.is_cuda:
        return CudaLinear(weight)
    return OneDnnLinear(weight, keep_rows) if library(weight) is None else NativeLinear(weight, allocate)


def plain(weight: Weight) -> torch.Tensor:
    """The weight of a norm, which is never quantized."""
    assert isinstance(weight, torch.Tensor)
    return weight


def moved(weight: Weight, device: torch.device) -> Weight:
    """The weight on another device. Weights for INT8 activations stay on the CPU."""
    if isinstance(weight, Int8Weight):
        assert device.type == "cpu"
        return weight
    return weight.to(device)


def pack_rows(weight: Weight, allocate: Allocate = small_pages) -> Callable[[torch.Tensor], torch.Tensor]:
    """Keep an embedding that is not also the head, so that no product needs it.

    Returns:
        A function from row ids (int64 [T]) to these rows of the weight, fp32 [T, in_features].
    """
    if isinstance(weight, Int8Weight):
        weight = weight.groups
    if isinstance(weight, torch.Tensor):
        return partial(_rows_of, weight.contiguous())
    native = library() is not None and not runs_triton(weight.values)
    return NativeGroupedLinear(weight, allocate).rows if native else weight.rows


def _rows_of(weight: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    lib = library(weight)
    if lib is None:
        return weight[ids].float()
    count, width = ids.shape[0], weight.shape[1]
    out = empty(count, width, dtype=torch.float32)
    lib.kvloom_rows(weight.data_ptr(), weight.dtype is torch.bfloat16, ids.data_ptr(), count, width, out.data_ptr())
    return out


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """Concatenate the outputs of weights of one kind that have the same input."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    assert len(weights) in (len(tensors), len(grouped), len(int8)), "the weights are of several kinds"
    if tensors:
        return torch.cat(tensors)
    return GroupedWeight.concat(grouped) if grouped else Int8Weight.concat(int8)
