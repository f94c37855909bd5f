"""Products with weights of 8 and 4 bits in groups, which run at memory bandwidth.

One kernel computes any number of rows, so that a weight has the same value in every batch. Dequantizing it to bfloat16
for cuBLAS would round it.
"""

import torch
import triton

from kvloom.ops.gpu import linear_kernels as kernels
from kvloom.ops.gpu.attention_parts import multiprocessors
from kvloom.ops.gpu.linear_splits import COLUMNS, MAX_ROWS, split_count

_MAX_WITH_MINIMA = 1024
"""The most rows times words of a row of weights. With minima there are no registers for more sums."""

_SUM_BLOCK = 1024

_MIDDLE = 8
"""The offset of 4-bit values: a weight without minima is ``(values - 8) * scale``."""


class QuantizedLinear:
    """A weight [out_features, in_features] = values * scale (+ minimum). Scale and minimum are per row and group.

    It is a ``kvloom.ops.linear.TiedLinear``.

    Args:
        bits: 8 for int8 values, 4 for uint8 values of 0 to 15.
        values: [out_features, in_features].
        scales: fp16 [out_features, in_features / group]. The last group may be shorter.
        minima: like ``scales``, for 4 bits only, as in GGUF's Q4_1. Those of GPTQ and AWQ would be ``-zero * scale``.
            None: 8-bit values are signed, and 4-bit values have an offset of 8 as in Q4_0.
        group: 32, as in GGUF's Q8_0, Q4_0 and Q4_1; or, for 4 bits, 128, as usual with GPTQ and AWQ. No served model
            has groups of 128: only tests and the kernel audit use them.
    """

    def __init__(
        self, bits: int, values: torch.Tensor, scales: torch.Tensor, minima: torch.Tensor | None, group: int = 32
    ):
        self.out_features, self.in_features = values.shape
        assert values.dtype is (torch.int8 if bits == 8 else torch.uint8) and scales.dtype is torch.float16
        assert (bits, group) in ((8, 32), (4, 32), (4, 128)) and (bits == 4 or minima is None)
        assert scales.shape == (self.out_features, -(-self.in_features // group))
        self._planes = 16 // bits
        # A plane is a group of 32, or half of a group of 128
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
        # AMD's matrix instructions need at least 16 rows
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
    """Pack numbers [out_features, in_features] into words: bytes if ``planes`` is 2, 4-bit numbers if it is 4.

    A block has planes * width in_features; the last block is padded with 0. Word j of a row in a block holds the row's
    numbers j, j + width, j + 2 * width, ..., the first of them in the lowest bits.

    Returns:
        uint16 [blocks, out_features, width]. The rows of a block that a program reads are contiguous.
    """
    block = planes * width
    numbers = _padded(weight, -(-weight.shape[1] // block) * block).to(torch.int16) & (0xFF if planes == 2 else 0xF)
    numbers = numbers.view(len(weight), -1, planes, width)
    words = numbers[:, :, 0].clone()
    for plane in range(1, planes):
        words |= numbers[:, :, plane] << (16 // planes * plane)
    return words.view(torch.uint16).transpose(0, 1).contiguous()


def _pair(scales: torch.Tensor, minima: torch.Tensor | None, groups: int) -> torch.Tensor:
    """Pairs of a scale and a minimum, int32 [groups, out_features]. Without minima of two scales, [groups / 2, ...]."""
    scales = _padded(scales, groups)
    pairs = scales.view(len(scales), -1, 2) if minima is None else torch.stack((scales, _padded(minima, groups)), 2)
    return pairs.contiguous().view(torch.int32)[:, :, 0].t().contiguous()


def _backend() -> str:
    """The backend that kernels are compiled for, "cuda" or "hip", or "interpreted"."""
    if not isinstance(kernels.quantized_product, triton.JITFunction):
        return "interpreted"
    return str(triton.runtime.driver.active.get_current_target().backend)


def _stages(backend: str, tile: int) -> int:
    """Blocks to load ahead. They fit into 64 KiB of shared memory on AMD's GPUs and into 160 KiB on NVIDIA's."""
    if backend == "hip":
        return 2
    return 4 if tile <= 32 else 3


def _warps(tile: int, width: int) -> int:
    """The fewest warps with enough registers, so that a warp reuses each row of weights for more columns."""
    return 2 if tile * width <= 512 else 4 if tile <= 32 else 8


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
