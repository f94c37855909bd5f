"""Products of INT8 activations with INT8 weights. Both have one scale per group of inputs."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.ops.linear_groups import GroupedWeight, grouped_bytes
from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages

WIDE_GROUP = 64
"""The number of inputs that share a scale in a layer's weights.

Applying the scales of a weight and a row costs as much as multiplying 8 inputs. With groups of 32 that is a fifth of a
product's instructions, with this size a ninth.
"""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features] for activations that are quantized to INT8.

    Attributes:
        groups: the weight with 8 bits in groups of ``GROUP`` or ``WIDE_GROUP``. Activations are quantized like weights,
            in groups of the same size: the largest value of a group becomes 127.
    """

    groups: GroupedWeight

    def __post_init__(self) -> None:
        assert self.groups.bits == 8

    @classmethod
    def concat(cls, weights: Sequence["Int8Weight"]) -> "Int8Weight":
        """Concatenate the outputs of weights that have the same input."""
        return cls(GroupedWeight.concat([weight.groups for weight in weights]))


class _Packed:
    """A weight packed in panels; see cpu/linear_int8.cpp."""

    def __init__(self, weight: Int8Weight, allocate: Allocate, gated: bool):
        lib = library()
        assert lib is not None
        self._lib = lib
        groups = weight.groups
        rows, self._width = groups.shape
        assert not gated or rows % 2 == 0
        self._out_features = rows // 2 if gated else rows
        self._in_features, self._group = groups.values.shape[1], groups.group
        self._packed = allocate(grouped_bytes(rows, self._width, 8, lib.kvloom_linear_panel(), self._group))
        values, scales = groups.values.contiguous(), groups.scales.contiguous()
        lib.kvloom_int8_pack(
            self._group,
            values.data_ptr(),
            scales.data_ptr(),
            rows,
            self._in_features,
            gated,
            self._packed.data_ptr(),
        )

    def _arguments(self, x: torch.Tensor) -> tuple[int, ...]:
        """The arguments of both products before the results."""
        assert x.shape[1] == self._width and x.is_contiguous() and library(x) is not None
        return (
            self._group,
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.shape[0],
            self._width,
            self._in_features,
            self._packed.data_ptr(),
            self._out_features,
        )


class NativeInt8GatedLinear(_Packed):
    """Gate and up side by side. They are activated while both are in the CPU's cache; see ``pack_gated_linear``."""

    def __init__(self, weight: Int8Weight, allocate: Allocate = small_pages):
        super().__init__(weight, allocate, gated=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``GatedLinear``."""
        out = empty(x.shape[0], self._out_features, dtype=x.dtype)
        self._lib.kvloom_int8_gated(*self._arguments(x), out.data_ptr())
        return out


class NativeInt8Linear(_Packed):
    """A packed weight whose rows can also be read."""

    def __init__(self, weight: Int8Weight, allocate: Allocate = small_pages):
        super().__init__(weight, allocate, gated=False)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        assert out_dtype in (None, x.dtype, torch.float32)
        out = empty(x.shape[0], self._out_features, dtype=out_dtype or x.dtype)
        self._lib.kvloom_int8(*self._arguments(x), out.data_ptr(), out.dtype is torch.bfloat16)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``TiedLinear``."""
        out = empty(ids.shape[0], self._width, dtype=torch.float32)
        self._lib.kvloom_int8_rows(
            self._group,
            self._packed.data_ptr(),
            ids.data_ptr(),
            ids.shape[0],
            self._in_features,
            self._width,
            out.data_ptr(),
        )
        return out
