"""Weights of 4 or 8 bits in groups of inputs, and products with them. Integers are exact and scaled by group."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages

GROUP = 32
"""The number of inputs that share a scale, as in GGUF's Q4_0, Q4_1 and Q8_0."""


@dataclass(frozen=True, slots=True)
class GroupedWeight:
    """A weight [out_features, in_features] = values * scale (+ minimum). Scale and minimum are per row and group.

    Attributes:
        bits: 4 for values 0 to 15 with minima, 8 for values -128 to 127.
        values: uint8 (4 bits) or int8 [out_features, in_features], padded with zeros to a multiple of a group.
        scales: fp16 [out_features, groups].
        minima: fp16 [out_features, groups]; None with 8 bits.
        in_features: the width without padding.
    """

    bits: Literal[4, 8]
    values: torch.Tensor
    scales: torch.Tensor
    minima: torch.Tensor | None
    in_features: int

    @classmethod
    def quantize(cls, weight: torch.Tensor, group: int = GROUP) -> "GroupedWeight":
        """Quantize an fp32 weight to 8 bits as GGUF's Q8_0 does: the largest value of a group becomes 127."""
        rows, width = weight.shape
        groups = torch.nn.functional.pad(weight, (0, -width % group)).view(rows, -1, group)
        scales = groups.abs().amax(-1) / 127
        inverse = torch.where(scales > 0, 1 / scales, 0.0)
        values = (groups * inverse[..., None]).round().to(torch.int8)
        return cls(8, values.view(rows, -1), scales.half(), None, width)

    @classmethod
    def concat(cls, weights: Sequence["GroupedWeight"]) -> "GroupedWeight":
        """Concatenate the outputs of weights that have the same input."""
        first = weights[0]
        minima = [weight.minima for weight in weights if weight.minima is not None]
        return cls(
            first.bits,
            torch.cat([weight.values for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
            torch.cat(minima) if minima else None,
            first.in_features,
        )

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.values.shape[0], self.in_features

    @property
    def group(self) -> int:
        """The number of inputs that share a scale. It differs from ``GROUP`` only for INT8 activations."""
        return self.values.shape[1] // self.scales.shape[1]

    def dequantize(self) -> torch.Tensor:
        """The weight in fp32, rounded once."""
        groups = self.values.view(*self.scales.shape, self.group).float() * self.scales.float()[..., None]
        if self.minima is not None:
            groups = groups + self.minima.float()[..., None]
        return groups.view(self.values.shape)[:, : self.in_features].contiguous()

    def to(self, device: torch.device) -> "GroupedWeight":
        """Copy the weight to another device."""
        minima = None if self.minima is None else self.minima.to(device)
        return GroupedWeight(self.bits, self.values.to(device), self.scales.to(device), minima, self.in_features)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 [T]) in fp32."""
        minima = None if self.minima is None else self.minima[ids]
        return GroupedWeight(self.bits, self.values[ids], self.scales[ids], minima, self.in_features).dequantize()


class NativeGroupedLinear:
    """A weight in groups, packed in panels; see cpu/linear_groups.cpp."""

    def __init__(self, weight: GroupedWeight, allocate: Allocate = small_pages):
        lib = library()
        assert lib is not None and weight.group == GROUP
        self._lib = lib
        self._bits = weight.bits
        self._out_features, self._width = weight.shape
        self._in_features = weight.values.shape[1]
        shape = self._out_features, self._in_features
        self._packed = allocate(grouped_bytes(*weight.shape, weight.bits, lib.kvloom_linear_panel()))
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        minima = None if weight.minima is None else weight.minima.contiguous()
        lib.kvloom_groups_pack(
            weight.bits,
            values.data_ptr(),
            scales.data_ptr(),
            None if minima is None else minima.data_ptr(),
            *shape,
            self._packed.data_ptr(),
        )

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        assert x.shape[1] == self._width and out_dtype in (None, x.dtype, torch.float32)
        if self._width != self._in_features:
            x = torch.nn.functional.pad(x, (0, self._in_features - self._width))
        assert x.is_contiguous() and library(x) is not None
        out = empty(x.shape[0], self._out_features, dtype=out_dtype or x.dtype)
        self._lib.kvloom_groups(
            self._bits,
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.shape[0],
            x.shape[1],
            self._packed.data_ptr(),
            self._out_features,
            out.data_ptr(),
            out.dtype is torch.bfloat16,
        )
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``TiedLinear``."""
        out = empty(ids.shape[0], self._width, dtype=torch.float32)
        self._lib.kvloom_groups_rows(
            self._bits,
            self._packed.data_ptr(),
            ids.data_ptr(),
            ids.shape[0],
            self._in_features,
            self._width,
            out.data_ptr(),
        )
        return out


def unpacked_bytes(out_features: int, in_features: int) -> int:
    """Bytes of a ``GroupedWeight`` of 8 bits, without packing."""
    return out_features * -(-in_features // GROUP) * (GROUP + 2)


def grouped_bytes(out_features: int, in_features: int, bits: int, panel: int = 32, group: int = GROUP) -> int:
    """Bytes of a weight packed in C++ in panels of ``panel`` outputs, 32 with the widest vectors."""
    head = 4 if bits == 4 else 2
    return -(-out_features // panel) * panel * -(-in_features // group) * (head + group * bits // 8)
