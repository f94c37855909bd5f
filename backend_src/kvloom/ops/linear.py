"""Matrix products with weights that are packed once, whatever they are made of."""

from collections.abc import Sequence
from typing import Protocol

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.linear_float import CudaLinear, NativeLinear, OneDnnLinear
from kvloom.ops.linear_groups import GroupedWeight, NativeGroupedLinear
from kvloom.ops.linear_int8 import Int8Weight, NativeInt8Linear, TorchInt8Linear
from kvloom.ops.native import library
from kvloom.ops.packed_memory import Allocate, small_pages

Weight = torch.Tensor | GroupedWeight | Int8Weight
"""A weight [out_features, in_features]: fp32 or bf16, integers in groups, or INT8 for INT8 activations."""


class Linear(Protocol):
    """y = x @ weight.T; on a CPU what a row gives does not depend on how many rows there are."""

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in x's dtype or ``out_dtype`` (fp32)."""


class TiedLinear(Linear, Protocol):
    """A head that is the embedding too."""

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 [T]) of the weight in fp32 [T, in_features]."""


def pack_linear(weight: Weight, dtype: torch.dtype | None = None, allocate: Allocate = small_pages) -> Linear:
    """Pack a weight so that small batches run at memory bandwidth, which a plain product does not.

    In C++ where that is built; else oneDNN's packed product of plain weights, and torch's of integers. On a GPU a plain
    product of plain weights does, and those in groups have a Triton kernel.

    Args:
        weight: the weight.
        dtype: of the activations, which a weight in groups takes on where there is no product of groups.
        allocate: makes the memory, in C++.
    """
    if isinstance(weight, Int8Weight):
        return TorchInt8Linear(weight) if library() is None else NativeInt8Linear(weight, allocate)
    return _pack(weight, dtype, allocate, keep_rows=False)


def pack_tied_linear(
    weight: torch.Tensor | GroupedWeight, dtype: torch.dtype | None = None, allocate: Allocate = small_pages
) -> TiedLinear:
    """The same for an embedding that is also the head; in C++ that is one weight for both."""
    return _pack(weight, dtype, allocate, keep_rows=True)


def _pack(
    weight: torch.Tensor | GroupedWeight, dtype: torch.dtype | None, allocate: Allocate, keep_rows: bool
) -> TiedLinear:
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
    """A weight that is never quantized: a norm's."""
    assert isinstance(weight, torch.Tensor)
    return weight


def moved(weight: Weight, device: torch.device) -> Weight:
    """The weight on another device; INT8 activations have products on a CPU only."""
    if isinstance(weight, Int8Weight):
        assert device.type == "cpu"
        return weight
    return weight.to(device)


def rows_of(weight: torch.Tensor | GroupedWeight, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` (int64 [T]) of a weight that no product needs, an embedding's, in fp32 [T, in_features]."""
    return weight[ids].float() if isinstance(weight, torch.Tensor) else weight.rows(ids)


def concat_rows(weights: Sequence[Weight]) -> Weight:
    """Weights of one kind for the same input as one weight, its outputs in order."""
    tensors = [weight for weight in weights if isinstance(weight, torch.Tensor)]
    grouped = [weight for weight in weights if isinstance(weight, GroupedWeight)]
    int8 = [weight for weight in weights if isinstance(weight, Int8Weight)]
    assert len(weights) in (len(tensors), len(grouped), len(int8)), "weights of several kinds"
    if tensors:
        return torch.cat(tensors)
    return GroupedWeight.concat(grouped) if grouped else Int8Weight.concat(int8)
