"""Reads GGUF's Q4_0, Q4_1 and Q8_0 without dequantizing them: their blocks are groups of integers with a scale."""

import gguf
import numpy as np
import torch

from kvloom.ops.linear_groups import GROUP, GroupedWeight

GROUPED = ("Q4_0", "Q4_1", "Q8_0")
"""The types that ``grouped_weight`` reads."""


def grouped_weight(data: np.ndarray, kind: str) -> GroupedWeight:
    """Turn a tensor's raw data, uint8 [rows, bytes], into a weight. ggml-common.h defines the blocks.

    Q4_0 values have an offset of 8. It becomes a minimum of -8 * scale, which is exact because 8 is a power of two.
    """
    _, size = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType[kind]]
    blocks = np.ascontiguousarray(data).reshape(len(data), -1, size)
    scales = _halves(blocks[..., :2])
    width = blocks.shape[1] * GROUP
    if kind == "Q8_0":
        values = torch.from_numpy(blocks[..., 2:].copy().view(np.int8).reshape(len(data), width))
        return GroupedWeight(8, values, scales, None, width)
    minima = _halves(blocks[..., 2:4]) if kind == "Q4_1" else -8 * scales
    nibbles = blocks[..., -GROUP // 2 :]
    # The low nibbles hold a block's first values
    values = torch.from_numpy(np.concatenate((nibbles & 15, nibbles >> 4), -1).reshape(len(data), width))
    return GroupedWeight(4, values, scales, minima, width)


def _halves(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy().view(np.float16)[..., 0])
