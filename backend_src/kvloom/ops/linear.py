"""Matrix products with weights that are packed once."""

import torch

BATCH_HINT = 32
"""Rows per product that the packed layout is chosen for: a decode batch."""


class PackedLinear:
    """y = x @ weight.T with the weight in oneDNN's blocked layout (fp32 or bf16, CPU).

    Packing makes small batches run at memory bandwidth, where a plain product does not.
    """

    def __init__(self, weight: torch.Tensor):
        self.out_features, self.in_features = weight.shape
        self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), BATCH_HINT)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in x's dtype."""
        if x.shape[0] == 1:
            # oneDNN sums one row in another order than two: a lone request would differ from one in a batch
            return self._product(x.expand(2, -1).contiguous())[:1]
        return self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self._packed, None, "none", [], "")
