"""Products with weights of 8 and 4 bits in groups, made to be bound by the memory that the weights come from.

One kernel computes any number of rows, so that a weight is the same number whatever the batch: to dequantize it to
bfloat16 for large batches, and leave these to cuBLAS, would round it.
"""

import torch
import triton

from kvloom.ops.gpu import linear_kernels as kernels
from kvloom.ops.gpu.attention_parts import multiprocessors
from kvloom.ops.gpu.linear_splits import COLUMNS, MAX_ROWS, split_count

_MAX_WITH_MINIMA = 1024
"""Rows times the words of a row of weights: with minima there are no registers for the sums of more."""

_SUM_BLOCK = 1024

_MIDDLE = 8
"""Of numbers of 4 bits: what a weight without minima stands for is ``(values - 8) * scale``."""


class QuantizedLinear:
    """A weight [out_features, in_features] = values * scale (+ minimum), both of a row's group of inputs.

    Satisfies ``kvloom.ops.linear.TiedLinear``.

    Args:
        bits: 8: values are int8; 4: they are uint8 of 0 to 15.
        values: [out_features, in_features].
        scales: fp16 [out_features, in_features / group]; a last group may be shorter.
        minima: like ``scales``, for 4 bits: GGUF's Q4_1 as it is; those of GPTQ and AWQ are ``-zero * scale``. None:
            signed values of 8 bits, values of 4 bits around 8 (as in Q4_0).
        group: 32 (as in GGUF's Q8_0, Q4_0 and Q4_1) or, for 4 bits, 128 (as GPTQ and AWQ mostly have it), which no
            model that is served has: only tests and audits use it.
    """

    def __init__(
        self, bits: int, values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, group: int = 32
    ):
        self.out_features, self.in_features = values.shape
        assert values.dtype is (torch.int8 if bits == 8 else torch.uint8) and scales.dtype is torch.float16
        assert (bits, group) in ((8, 32), (4, 32), (4, 128)) and (bits == 4 or minima is None)
        assert scales.shape == (self.out_features, -(-self.in_features // group))
        self._planes = 16 // bits
        # a plane is a group of 32, or half of one of 128
        width = min(group, 64)
        self._group = group // width
        self._words = pack(values, self._planes, width)
        self._minima = minima is not None and not torch.equal(minima.float(), -_MIDDLE * scales.float())
        self._pairs = _pair(
            scales, minima if self._minima else None, self._words.shape[0] * self._planes // self._group
        )
        self._split = split_count(self.out_features, self._words.shape[0], multiprocessors(self._words.device))

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] in fp32, fp16 or bf16 to [T, out_features], in x's dtype or ``out_dtype``."""
        assert x.is_contiguous() and x.shape[1] == self.in_features
        rows = x.shape[0]
        split = self._split if rows <= MAX_ROWS else 1
        out = torch.empty(rows, self.out_features, dtype=out_dtype or x.dtype, device=x.device)
        if not rows:
            return out
        parts = out
        if split > 1:
            parts = torch.empty(split, rows, self.out_features, dtype=torch.float32, device=x.device)
        backend = _backend()
        # AMD's matrix instructions take no fewer than 16
        least = 8 if backend == "cuda" else 16
        max_rows = _MAX_WITH_MINIMA // self._words.shape[2] if self._minima else MAX_ROWS
        tile = min(max(triton.next_power_of_2(rows), least), max_rows)
        grid = (triton.cdiv(self.out_features, COLUMNS), split, triton.cdiv(rows, tile))
        kernels.quantized_product[grid](
            x,
            self._words,
            self._pairs,
            parts,
            rows,
            self.out_features,
            self.in_features,
            self._words.shape[0],
            ROWS=tile,
            COLUMNS=COLUMNS,
            STAGES=_stages(backend, tile),
            PACKED=backend == "cuda",
            WHOLE=self.in_features % (self._planes * self._words.shape[2]) == 0,
            num_warps=_warps(tile, self._words.shape[2]),
            **self._shape,
        )
        if split > 1:
            size = out.numel()
            kernels.add_parts[(triton.cdiv(size, _SUM_BLOCK),)](parts, out, size, split, BLOCK=_SUM_BLOCK, num_warps=4)
        return out

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """Rows ``ids`` (int64 [T]) of the weight in fp32 [T, in_features]."""
        out = torch.empty(len(ids), self.in_features, dtype=torch.float32, device=ids.device)
        if len(ids):
            kernels.quantized_rows[(len(ids), self._words.shape[0])](
                ids,
                self._words,
                self._pairs,
                out,
                self.out_features,
                self.in_features,
                num_warps=1,
                **self._shape,
            )
        return out

    @property
    def _shape(self) -> dict[str, int | bool]:
        width = self._words.shape[2]
        return {"PLANES": self._planes, "WIDTH": width, "GROUP": self._group, "MINIMA": self._minima}


def pack(weight: torch.Tensor, planes: int, width: int) -> torch.Tensor:
    """Numbers [out_features, in_features], of a byte where ``planes`` is 2 and of 4 bits where it is 4, to words.

    A block is planes * width in_features, the last one padded with 0. Word j of a row of a block holds its numbers j,
    j + width, j + 2 * width, ..., the first in the lowest bits.

    Returns:
        uint16 [blocks, out_features, width]: whichever rows of a block a program reads, they have no gaps.
    """
    block = planes * width
    numbers = _padded(weight, -(-weight.shape[1] // block) * block).to(torch.int16) & (0xFF if planes == 2 else 0xF)
    numbers = numbers.view(len(weight), -1, planes, width)
    words = numbers[:, :, 0].clone()
    for plane in range(1, planes):
        words |= numbers[:, :, plane] << (16 // planes * plane)
    return words.view(torch.uint16).transpose(0, 1).contiguous()


def unpack(words: torch.Tensor, planes: int, in_features: int) -> torch.Tensor:
    """What ``pack`` was given: int8 where a word holds two numbers, uint8 where it holds four."""
    bits = 16 // planes
    numbers = torch.stack([words.to(torch.int32) >> bits * plane & 2**bits - 1 for plane in range(planes)], 2)
    numbers = numbers.permute(1, 0, 2, 3).reshape(words.shape[1], -1)[:, :in_features].to(torch.uint8).contiguous()
    return numbers.view(torch.int8) if planes == 2 else numbers


def _pair(scales: torch.Tensor, minima: torch.Tensor | None, groups: int) -> torch.Tensor:
    """int32 [groups, out_features] of a scale and a minimum each; without minima [groups / 2, ...] of two scales."""
    scales = _padded(scales, groups)
    pairs = scales.view(len(scales), -1, 2) if minima is None else torch.stack((scales, _padded(minima, groups)), 2)
    return pairs.contiguous().view(torch.int32)[:, :, 0].t().contiguous()


def _backend() -> str:
    """What kernels are compiled for, "cuda" or "hip"; or that they are "interpreted"."""
    if not isinstance(kernels.quantized_product, triton.JITFunction):
        return "interpreted"
    return str(triton.runtime.driver.active.get_current_target().backend)


def _stages(backend: str, tile: int) -> int:
    """Blocks that are on their way at once: what fits into 64 KiB on AMD's GPUs, into 160 on NVIDIA's."""
    if backend == "hip":
        return 2
    return 4 if tile <= 32 else 3


def _warps(tile: int, width: int) -> int:
    """As few as have the registers: what a warp does for each row of weights is done for more columns at once."""
    return 2 if tile * width <= 512 else 4 if tile <= 32 else 8


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
