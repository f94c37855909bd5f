"""Products with weights of 8 and 4 bits, for decode batches: as fast as the weights come from memory.

One kernel computes any number of rows, so that a weight is the same number whatever the batch: to dequantize it to
bfloat16 for large batches would round it.
"""

import torch
import triton

from kvloom.ops.gpu import linear_kernels as kernels

_COLUMNS = 128
"""out_features of a program."""

_LEAST_SHARE = 4
"""Blocks below which a sum is not divided any further: so many are loaded ahead."""

_PROGRAMS = 2
"""Programs per multiprocessor whose loads in flight are enough for all of the bandwidth."""

_SUM_BLOCK = 1024


class _QuantizedLinear:
    """What both have in common.

    Args:
        words: see ``pack``.
        planes: numbers in a word.
        in_features: width of the weight before it was padded.
        scale: [groups, out_features], or [out_features] where ``group`` is 0.
        zero: like ``scale``, or None.
        group: planes that have a scale together.
    """

    def __init__(
        self,
        words: torch.Tensor,
        planes: int,
        in_features: int,
        scale: torch.Tensor,
        zero: torch.Tensor | None,
        group: int,
    ):
        self.out_features, self.in_features = words.shape[1], in_features
        self._words, self._planes, self._scale, self._zero, self._group = words, planes, scale, zero, group
        self._split = split_count(self.out_features, words.shape[0], words.device)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """[T, in_features] in fp32, fp16 or bf16 to [T, out_features], in x's dtype or ``out_dtype``."""
        assert x.is_contiguous() and x.shape[1] == self.in_features
        rows, split = x.shape[0], self._split
        out = torch.empty(rows, self.out_features, dtype=out_dtype or x.dtype, device=x.device)
        if not rows:
            return out
        parts = out
        if split > 1:
            parts = torch.empty(split, rows, self.out_features, dtype=torch.float32, device=x.device)
        # with zeros, registers are not enough for more
        tile = min(max(triton.next_power_of_2(rows), 16), 64 if self._zero is None else 32)
        backend = _backend()
        grid = (triton.cdiv(self.out_features, _COLUMNS), split, triton.cdiv(rows, tile))
        kernels.quantized_product[grid](
            x,
            self._words,
            self._scale,
            self._zero,
            parts,
            rows,
            self.out_features,
            self.in_features,
            self._words.shape[0],
            ROWS=tile,
            COLUMNS=_COLUMNS,
            PLANES=self._planes,
            WIDTH=self._words.shape[2],
            GROUP=self._group,
            SPLIT=split,
            WHOLE=self.in_features % (self._planes * self._words.shape[2]) == 0,
            STAGES=_stages(backend, tile),
            PACKED=backend == "cuda",
            num_warps=4 if tile <= 32 else 8,
        )
        if split > 1:
            size = out.numel()
            kernels.add_parts[(triton.cdiv(size, _SUM_BLOCK),)](
                parts, out, size, SPLIT=split, BLOCK=_SUM_BLOCK, num_warps=4
            )
        return out


class Int8Linear(_QuantizedLinear):
    """A weight of int8 and a scale for each of its rows; satisfies ``kvloom.ops.linear.Linear``.

    Args:
        weight: int8 [out_features, in_features].
        scale: any float dtype [out_features]; the weight stands for ``weight * scale[:, None]``.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor):
        assert weight.dtype is torch.int8 and scale.shape == weight.shape[:1]
        super().__init__(pack(weight, 2, 64), 2, weight.shape[1], scale.contiguous(), None, 0)


class Int4Linear(_QuantizedLinear):
    """A weight of 4 bits with a scale, and maybe a zero, for groups of a row; satisfies ``kvloom.ops.linear.Linear``.

    Args:
        weight: uint8 [out_features, in_features] of 0 to 15.
        scale: any float dtype [out_features, in_features / group]; a group is 32 (as in GGUF's Q4_0 and Q4_1) or 128
            (as GPTQ and AWQ mostly have it); a last one may be shorter.
        zero: like ``scale``, whole numbers or not; the weight stands for ``(weight - zero) * scale``. None: 8.
    """

    def __init__(self, weight: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None):
        out_features, in_features = weight.shape
        assert weight.dtype is torch.uint8
        # a plane is a group of 32, or half of one of 128
        width = 32 if scale.shape[1] == -(-in_features // 32) else 64
        group = 1 if width == 32 else 2
        assert scale.shape == (out_features, -(-in_features // (width * group)))
        words = pack(weight, 4, width)
        groups = words.shape[0] * 4 // group

        def by_group(values: torch.Tensor) -> torch.Tensor:
            return _padded(values, groups).t().contiguous()

        super().__init__(words, 4, in_features, by_group(scale), None if zero is None else by_group(zero), group)


def pack(weight: torch.Tensor, planes: int, width: int) -> torch.Tensor:
    """Numbers [out_features, in_features], of a byte where ``planes`` is 2 and of 4 bits where it is 4, to words.

    A block is planes * width in_features, the last one padded with 0. Word j of a row of a block holds its numbers j,
    j + width, j + 2 * width, ..., the first in the lowest bits.

    Returns:
        uint16 [blocks, out_features, width]: whichever rows of a block a program reads, they have no gaps.
    """
    block = planes * width
    numbers = _padded(weight, -(-weight.shape[1] // block) * block).to(torch.int32) & (0xFF if planes == 2 else 0xF)
    numbers = numbers.view(len(weight), -1, planes, width)
    words = numbers[:, :, 0].clone()
    for plane in range(1, planes):
        words |= numbers[:, :, plane] << (16 // planes * plane)
    return words.to(torch.uint16).transpose(0, 1).contiguous()


def unpack(words: torch.Tensor, planes: int, in_features: int) -> torch.Tensor:
    """What ``pack`` was given: int8 where a word holds two numbers, uint8 where it holds four."""
    bits = 16 // planes
    numbers = torch.stack([words.to(torch.int32) >> bits * plane & 2**bits - 1 for plane in range(planes)], 2)
    numbers = numbers.permute(1, 0, 2, 3).reshape(words.shape[1], -1)[:, :in_features].to(torch.uint8).contiguous()
    return numbers.view(torch.int8) if planes == 2 else numbers


def split_count(out_features: int, blocks: int, device: torch.device) -> int:
    """Programs that share a column's sum: of the weight's shape and the GPU alone, so that rows don't change it."""
    # without a GPU, where this is compiled and tested only, an H100's
    processors = torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 132
    columns = triton.cdiv(out_features, _COLUMNS)
    split = 1
    while columns * split < processors * _PROGRAMS and blocks >= 2 * split * _LEAST_SHARE:
        split *= 2
    return split


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


def _padded(values: torch.Tensor, width: int) -> torch.Tensor:
    return torch.nn.functional.pad(values, (0, width - values.shape[1]))
