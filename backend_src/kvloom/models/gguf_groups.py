"""GGUF's simple quantized types, whose blocks are groups of integers with a scale: taken over as they are."""

import gguf
import numpy as np
import torch

from kvloom.ops.linear_groups import GROUP, GroupedWeight

GROUPED = ("Q4_0", "Q4_1", "Q8_0")
"""The types that ``grouped_weight`` knows."""


def grouped_weight(data: np.ndarray, kind: str) -> GroupedWeight:
    """A tensor's raw data, uint8 [rows, bytes], as a weight; the blocks are those of ggml-common.h.

    Q4_0's values lie around 8, which becomes a minimum of -8 scales: exact, the scale only moves by a power of two.
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
    # the low halves of the bytes are a block's first values
    values = torch.from_numpy(np.concatenate((nibbles & 15, nibbles >> 4), -1).reshape(len(data), width))
    return GroupedWeight(4, values, scales, minima, width)


def _halves(data: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(data.copy().view(np.float16)[..., 0])
