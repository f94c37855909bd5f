"""How close a kernel must come to float64 arithmetic, by the dtype of its result."""

import torch

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1e-2}
"""Share of the largest number of a result, or of 1 where that is smaller."""


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Hold a result against float64 numbers."""
    assert actual.shape == expected.shape
    scale = max(expected.abs().max().item(), 1.0)
    # a NaN is no number below the tolerance
    assert (actual.double() - expected).abs().max().item() <= TOLERANCE[actual.dtype] * scale
