"""Products with fp32 and bf16 weights."""

from collections.abc import Iterable

import torch

from kvloom.ops.native import empty, library
from kvloom.ops.packed_memory import Allocate, small_pages

BLOCK_ROWS = 16
"""oneDNN: every product has this many rows. Fewer rows are padded, more are split into several products.

oneDNN chooses instructions (AMX or not) and the order of sums by the number of rows. With a fixed number a row's result
does not depend on other rows, and each shape of weight needs only one kernel. A single row costs as much as 16, but
that is little compared to reading the weight.
"""

MAX_SUM = 192
"""oneDNN: the most fp32 products to add up in one accumulator.

oneDNN's packed product adds all of in_features one after the other. At 1,536 features its rounding error is twice that
of a plain product, which adds blocks. Adding partial sums avoids that and costs about a fifth of the speed. fp32 is
chosen for exactness.
"""

_PACKED_ROWS = 64
_PACKED_COLUMN_BYTES = 64
"""oneDNN packs weights in tiles and pads them to multiples of this many rows and bytes per row (AVX-512)."""

_KERNEL_BYTES = 640 * 2**10
"""oneDNN keeps a kernel for each shape of product. Measured: 0.56 to 0.58 MiB each (AVX-512, fp32 and bf16)."""


class _Packed:
    """A weight packed in panels; see cpu/linear_float.cpp."""

    def __init__(self, weight: torch.Tensor, allocate: Allocate, gated: bool):
        lib = library(weight)
        assert lib is not None
        self._lib = lib
        rows, in_features = weight.shape
        assert not gated or rows % 2 == 0
        self._out_features = rows // 2 if gated else rows
        self._width = in_features
        pair = lib.kvloom_linear_pair() if weight.dtype is torch.bfloat16 else 1
        panel = lib.kvloom_linear_panel()
        self._in_features = -(-in_features // pair) * pair
        panels = -(-self._out_features // (panel // 2 if gated else panel))
        size = panels * panel * self._in_features * weight.itemsize
        self._packed = allocate(size).view(weight.dtype)
        weight = weight.contiguous()
        lib.kvloom_linear_pack(
            weight.data_ptr(),
            weight.dtype is torch.bfloat16,
            rows,
            in_features,
            self._in_features,
            gated,
            self._packed.data_ptr(),
        )

    def _padded(self, x: torch.Tensor) -> torch.Tensor:
        assert x.shape[1] == self._width
        if self._width != self._in_features:
            x = torch.nn.functional.pad(x, (0, self._in_features - self._width))
        assert x.is_contiguous() and x.dtype is self._packed.dtype
        return x


class NativeGatedLinear(_Packed):
    """Gate and up side by side. They are activated in registers and never stored; see ``pack_gated_linear``."""

    def __init__(self, weight: torch.Tensor, allocate: Allocate = small_pages):
        super().__init__(weight, allocate, gated=True)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """See ``GatedLinear``."""
        x = self._padded(x)
        out = empty(x.shape[0], self._out_features, dtype=x.dtype)
        self._lib.kvloom_linear_gated(
            x.data_ptr(),
            x.dtype is torch.bfloat16,
            x.shape[0],
            x.shape[1],
            self._packed.data_ptr(),
            self._out_features,
            out.data_ptr(),
        )
        return out


class NativeLinear(_Packed):
    """A packed weight whose rows can also be read."""

    def __init__(self, weight: torch.Tensor, allocate: Allocate = small_pages):
        super().__init__(weight, allocate, gated=False)

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        assert out_dtype in (None, x.dtype, torch.float32)
        x = self._padded(x)
        out = empty(x.shape[0], self._out_features, dtype=out_dtype or x.dtype)
        self._lib.kvloom_linear(
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
        self._lib.kvloom_linear_rows(
            self._packed.data_ptr(),
            self._packed.dtype is torch.bfloat16,
            ids.data_ptr(),
            ids.shape[0],
            self._width,
            self._in_features,
            out.data_ptr(),
        )
        return out


class CudaLinear:
    """A product with cuBLAS. Its order of summation, and so the last bits, may depend on the number of rows.

    It sums in fp32 if ``torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction`` is off.
    """

    def __init__(self, weight: torch.Tensor):
        self._weight = weight.contiguous()

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        if out_dtype is None or out_dtype is x.dtype:
            return torch.mm(x, self._weight.t())
        return torch.mm(x, self._weight.t(), out_dtype=out_dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``TiedLinear``."""
        return self._weight[ids].float()


class OneDnnLinear:
    """A weight in oneDNN's blocked layout. The plain weight is kept, too, if rows are needed."""

    def __init__(self, weight: torch.Tensor, keep_rows: bool = False):
        self._weight = weight if keep_rows else None
        self._dtype = packed_dtype(weight.dtype)
        self._split = _split(weight.shape[1], self._dtype)
        self._packed = [
            torch.ops.mkldnn._reorder_linear_weight(part.to(self._dtype).contiguous(), BLOCK_ROWS)
            for part in weight.split(self._split, 1)
        ]

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        """See ``Linear``."""
        rows = x.shape[0]
        padded = torch.nn.functional.pad(x.to(self._dtype), (0, 0, 0, -rows % BLOCK_ROWS))
        blocks = [self._product(block) for block in padded.split(BLOCK_ROWS)]
        return torch.cat(blocks)[:rows].to(out_dtype or x.dtype)

    def rows(self, ids: torch.Tensor) -> torch.Tensor:
        """See ``TiedLinear``."""
        assert self._weight is not None
        return self._weight[ids].float()

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        first, *others = x.split(self._split, 1)
        y = torch.ops.mkldnn._linear_pointwise(first, self._packed[0], None, "none", [], "")
        for part, packed in zip(others, self._packed[1:], strict=True):
            y = torch.ops.mkldnn._linear_pointwise.binary(part, y, packed, None, "add")
        return y


def packed_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype of weights in ``OneDnnLinear``: fp32 if oneDNN can't pack bf16, as on CPUs without AVX-512."""
    return dtype if torch.ops.mkldnn._is_mkldnn_bf16_supported() else torch.float32


def packed_bytes(out_features: int, in_features: int, dtype: torch.dtype) -> int:
    """Bytes of a weight [out_features, in_features] packed by oneDNN in ``dtype``.

    A ``NativeLinear`` takes a little less.
    """
    split = _split(in_features, dtype)
    widths = [min(split, in_features - start) for start in range(0, in_features, split)]
    row = sum(_up(width * dtype.itemsize, _PACKED_COLUMN_BYTES) for width in widths)
    return _up(out_features, _PACKED_ROWS) * row


def kernels_bytes(widths: Iterable[int], dtype: torch.dtype) -> int:
    """Bytes of oneDNN's kernels for weights packed in ``dtype``, given each weight's in_features."""
    count = 0
    for in_features in widths:
        # One kernel for the first part, one that adds another part, and one that adds a narrower last part
        split = _split(in_features, dtype)
        count += 1 + (in_features > split) + (in_features > split and in_features % split > 0)
    return count * _KERNEL_BYTES


def _split(in_features: int, dtype: torch.dtype) -> int:
    """The number of in_features per product."""
    # bf16 products sum in fp32 and round at the end. Several parts would round several times
    parts = -(-in_features // MAX_SUM) if dtype is torch.float32 else 1
    return -(-in_features // parts)


def _up(number: int, step: int) -> int:
    return -(-number // step) * step
