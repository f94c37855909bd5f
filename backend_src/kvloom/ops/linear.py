"""Matrix products with weights that are packed once."""

import torch

BATCH_HINT = 32
"""Rows per product that the packed layout is chosen for: a decode batch."""

MAX_SUM = 192
"""Longest sum of fp32 products that oneDNN adds up in one accumulator.

Its packed product adds all of in_features one after the other, with twice the rounding error of the blocked sums of a
plain product at 1,536 features. Sums of sums get that back, for about a fifth of the speed: who asks for fp32 wants it
exact.
"""


def kernel_rows(rows: int) -> int:
    """Rows that a product of ``rows`` rows is computed with: up to an eighth more, so that there are few numbers.

    oneDNN builds a kernel for each number of rows, milliseconds and up to a megabyte each, and keeps up to 1,024.
    And it may sum one row in another order than two: a lone request would differ from one in a batch.
    """
    step = 1 << max(0, (rows - 1).bit_length() - 4)
    return max(2, -(-rows // step) * step) if rows else 0


class PackedLinear:
    """y = x @ weight.T with the weight in oneDNN's blocked layout (fp32 or bf16, CPU).

    Packing makes small batches run at memory bandwidth, where a plain product does not. A row's result does not depend
    on how many rows there are.
    """

    def __init__(self, weight: torch.Tensor):
        """Pack a weight [out_features, in_features]."""
        in_features = weight.shape[1]
        # bf16 sums are kept in fp32 inside the product and rounded at its end: parts would be rounded each
        parts = -(-in_features // MAX_SUM) if weight.dtype is torch.float32 else 1
        self._split = -(-in_features // parts)
        self._packed = [
            torch.ops.mkldnn._reorder_linear_weight(part.contiguous(), BATCH_HINT)
            for part in weight.split(self._split, 1)
        ]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """[T, in_features] to [T, out_features], in x's dtype."""
        rows = x.shape[0]
        padding = kernel_rows(rows) - rows
        return self._product(torch.nn.functional.pad(x, (0, 0, 0, padding)))[:rows] if padding else self._product(x)

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = x.split(self._split, 1)
        y = torch.ops.mkldnn._linear_pointwise(first, self._packed[0], None, "none", [], "")
        for part, packed in zip(others, self._packed[1:], strict=True):
            y = torch.ops.mkldnn._linear_pointwise.binary(part, y, packed, None, "add")
        return y
