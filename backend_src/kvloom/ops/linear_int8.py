"""Products of INT8 activations with INT8 weights: a scale per token, one per output."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages

MOST = 127
"""The largest integer: the range is symmetric, so that there are no zero points."""


@dataclass(frozen=True, slots=True)
class Int8Weight:
    """A weight [out_features, in_features] = values * scale of the output, for activations that are rounded too.

    Attributes:
        values: int8 [out_features, in_features].
        scales: fp32 [out_features].
    """

    values: torch.Tensor
    scales: torch.Tensor

    @classmethod
    def quantize(cls, weight: torch.Tensor) -> "Int8Weight":
        """Round a weight (fp32): the largest of an output becomes 127."""
        return cls(*_quantize(weight))

    @classmethod
    def concat(cls, weights: Sequence["Int8Weight"]) -> "Int8Weight":
        """Weights for the same input as one, their outputs in order."""
        return cls(torch.cat([weight.values for weight in weights]), torch.cat([weight.scales for weight in weights]))

    @property
    def shape(self) -> tuple[int, int]:
        """(out_features, in_features)."""
        return self.values.shape[0], self.values.shape[1]


def _quantize(rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    largest = rows.abs().amax(-1)
    inverse = torch.where(largest > 0, MOST / largest, 0.0)
    return (rows * inverse[:, None]).round().to(torch.int8), largest / MOST


class NativeInt8Linear:
    """See cpu/linear_int8.cpp."""

    def __init__(self, weight: Int8Weight, allocate: Allocate = small_pages):
        lib = library()
        assert lib is not None
        self._lib = lib
        self._out_features, self._width = weight.shape
        self._in_features = -(-self._width // 4) * 4
        shape = self._out_features, self._in_features
        self._packed = allocate(int8_bytes(*weight.shape, lib.kvloom_linear_panel()))
        values, scales = weight.values.contiguous(), weight.scales.contiguous()
        lib.kvloom_int8_pack(
            values.data_ptr(), scales.data_ptr(), shape[0], self._width, shape[1], self._packed.data_ptr()
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


class TorchInt8Linear:
    """The same in torch: integers throughout, so that the results are the same but for the last rounding."""

    def __init__(self, weight: Int8Weight):
        self._values, self._scales = weight.values.T.contiguous(), weight.scales

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        values, scales = _quantize(x.float())
        sums = torch._int_mm(values, self._values)
        return (sums.float() * (scales[:, None] * self._scales)).to(out_dtype or x.dtype)


def int8_bytes(out_features: int, in_features: int, panel: int = 32) -> int:
    """Bytes of a weight in ``NativeInt8Linear``; ``panel`` outputs lie together, 32 where vectors are widest."""
    beside = 8  # a scale and an offset
    return -(-out_features // panel) * panel * (-(-in_features // 4) * 4 + beside)
