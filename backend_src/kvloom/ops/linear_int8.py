"""Products of INT8 activations with INT8 weights, both in groups of 32 inputs with a scale each."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.ops.linear_groups import GroupedWeight, grouped_bytes
from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features] for activations that are rounded to INT8, too.

    Attributes:
        groups: the weight, of 8 bits. An activation's group is rounded as a weight's is: the largest becomes 127.
    """

    groups: GroupedWeight

    def __post_init__(self) -> None:
        assert self.groups.bits == 8

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> "Int8Weight":
        """Round a weight (fp32)."""
        return cls(GroupedWeight.quantize(weight))

    @classmethod
    def concat(cls, weights: Sequence["Int8Weight"]) -> "Int8Weight":
        """Weights for the same input as one, their outputs in order."""
        return cls(GroupedWeight.concat([weight.groups for weight in weights]))


class NativeInt8Linear:
    """See cpu/linear_int8.cpp."""

    def __init__(self, weight: Int8Weight, allocate: Allocate = small_pages):
        lib = library()
        assert lib is not None
        self._lib = lib
        groups = weight.groups
        self._out_features, self._width = groups.shape
        self._in_features = groups.values.shape[1]
        self._packed = allocate(grouped_bytes(*groups.shape, 8, lib.kvloom_linear_panel()))
        values, scales = groups.values.contiguous(), groups.scales.contiguous()
        lib.kvloom_int8_pack(
            values.data_ptr(), scales.data_ptr(), self._out_features, self._in_features, self._packed.data_ptr()
        )

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        assert x.shape[1] == self._width and out_dtype in (None, x.dtype, torch.float32)
        assert x.is_contiguous() and library(x) is not None
        out = empty(x.shape[0], self._out_features, dtype=out_dtype or x.dtype)
        self._lib.kvloom_int8(
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.shape[0],
            self._width,
            self._in_features,
            self._packed.data_ptr(),
            self._out_features,
            out.data_ptr(),
            out.dtype is torch.bfloat16,
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``TiedLinear``."""
        out = empty(ids.shape[0], self._width, dtype=torch.float32)
        self._lib.kvloom_int8_rows(
            self._packed.data_ptr(), ids.data_ptr(), ids.shape[0], self._in_features, self._width, out.data_ptr()
        )
        return out
