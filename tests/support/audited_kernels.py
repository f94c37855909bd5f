"""Kernels for tests of the audit: one that streams well, one that spills registers, one with narrow loads."""

import torch
import triton
import triton.language as tl


@triton.jit
def _row_sums(source, out, rows, stride, TILE: tl.constexpr, WIDTH: tl.constexpr):
    column = tl.arange(0, WIDTH)
    total = tl.zeros([WIDTH], tl.float32)
    for start in tl.range(0, rows, TILE):
        row = start + tl.arange(0, TILE)
        values = tl.load(source + row[:, None] * stride + column[None, :], mask=row[:, None] < rows, other=0.0)
        total += tl.sum(values.to(tl.float32), 0)
    tl.store(out + column, total)


def row_sums(aligned: bool) -> None:
    # Rows of 129 numbers are not aligned
    source, out = torch.empty(4096, 128 if aligned else 129, dtype=torch.bfloat16), torch.empty(128)
    _row_sums[(1,)](source, out, 4096, source.stride(0), TILE=64, WIDTH=128, num_warps=4)


@triton.jit
def _crowded(source, out, ROWS: tl.constexpr, SIZE: tl.constexpr):
    """Keeps more numbers at once than fit into a warp's registers."""
    row, column = tl.arange(0, ROWS)[:, None], tl.arange(0, SIZE)[None, :]
    values = tl.load(source + row * SIZE + column)
    values = values * tl.sum(values, 0)[None, :] + tl.max(values, 1)[:, None]
    tl.store(out + row * SIZE + column, values * tl.sum(values, 0)[None, :])


def crowded(width: int) -> None:
    source, out = torch.empty(2, 64, width)
    _crowded[(1,)](source, out, ROWS=64, SIZE=width, num_warps=1)


@triton.jit
def _large(a, b, out, SIZE: tl.constexpr):
    """Needs more shared memory than there is."""
    row, column = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    total = tl.zeros([SIZE, SIZE], tl.float32)
    for step in tl.range(0, 16, num_stages=6):
        left = tl.load(a + step * SIZE * SIZE + row * SIZE + column)
        right = tl.load(b + step * SIZE * SIZE + row * SIZE + column)
        total = tl.dot(left, right, acc=total)
    tl.store(out + row * SIZE + column, total)


def large() -> None:
    a, b = torch.empty(2, 16, 128, 128, dtype=torch.bfloat16)
    _large[(1,)](a, b, torch.empty(128, 128), SIZE=128, num_warps=8)
