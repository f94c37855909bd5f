"""Triton's interpreter itself computes bfloat16 as a GPU does, or the other files here prove nothing."""

import torch
import triton
import triton.language as tl


@triton.jit
def _products(a, b, c, SIZE: tl.constexpr):
    rows, columns = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE)[None, :]
    product = tl.dot(tl.load(a + rows * SIZE + columns), tl.load(b + rows * SIZE + columns))
    tl.store(c + rows * SIZE + columns, product)


@triton.jit
def _elementwise(a, b, out, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x, y = tl.load(a + i), tl.load(b + i)
    tl.store(out + i, x + y)
    tl.store(out + SIZE + i, x * 0.3)
    tl.store(out + 2 * SIZE + i, tl.where(x > y, x, y))
    tl.store(out + 3 * SIZE + i, tl.exp(x.to(tl.float32)).to(tl.bfloat16))


def test_products_of_bfloat16():
    a, b = torch.randn(2, 32, 32).bfloat16()
    c = torch.full((32, 32), torch.nan)
    _products[(1,)](a, b, c, 32)
    assert (c.double() - a.double() @ b.double()).abs().max() < 1e-5


def test_elementwise_bfloat16():
    a, b = torch.randn(2, 256).bfloat16()
    out = torch.full((4, 256), torch.nan).bfloat16()
    _elementwise[(1,)](a, b, out, 256)
    # a plain number takes the tensor's dtype in triton
    factor = torch.tensor(0.3).bfloat16()
    expected = torch.stack([a + b, a * factor, torch.maximum(a, b), a.float().exp().bfloat16()])
    assert torch.equal(out[:3], expected[:3])
    # the exponentials of two libraries may round apart
    assert (out[3].float() / expected[3].float() - 1).abs().max() <= 2**-7
