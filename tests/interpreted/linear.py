"""Products with weights of 8 and 4 bits against float64, at shapes that fill no block, with poisoned results."""

import pytest
import torch
from tolerance import close

from kvloom.ops.gpu import linear
from kvloom.ops.gpu.linear import Int4Linear, Int8Linear, pack, unpack

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **options: empty(*args, **options).fill_(torch.nan))


def check(product, weight: torch.Tensor, dtype: torch.dtype, rows: int) -> None:
    """Hold a product with a weight that float64 knows against float64."""
    x = (torch.randn(rows, weight.shape[1]) / weight.shape[1] ** 0.5).to(dtype)
    expected = x.double() @ weight.T
    y = product(x)
    assert y.dtype is dtype
    close(y, expected)
    in_full = product(x, torch.float32)
    assert in_full.dtype is torch.float32
    close(in_full, expected)


@pytest.mark.parametrize("planes", [2, 4])
@pytest.mark.parametrize("width", [32, 64])
def test_packing_loses_nothing(planes, width):
    weight = torch.randint(-128, 128, (5, 300), dtype=torch.int8)
    if planes == 4:
        weight = weight.view(torch.uint8) & 0xF
    words = pack(weight, planes, width)
    assert words.shape == (-(-300 // (planes * width)), 5, width)
    assert torch.equal(unpack(words, planes, 300), weight)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("out_features", "in_features", "rows"), [(64, 128, 1), (200, 300, 5), (3, 8, 17), (130, 1024, 2)]
)
def test_int8(dtype, out_features, in_features, rows):
    weight = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    weight[:, 0], weight[0, -1] = -128, 127
    scale = torch.rand(out_features) / 50
    check(Int8Linear(weight, scale), weight.double() * scale.double()[:, None], dtype, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("zeros", [None, "whole", "any"])
@pytest.mark.parametrize(
    ("group", "out_features", "in_features", "rows"),
    [(32, 64, 128, 1), (32, 130, 288, 5), (128, 200, 300, 17), (128, 3, 256, 2), (32, 130, 1024, 2)],
)
def test_int4(dtype, zeros, group, out_features, in_features, rows):
    weight = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    groups = -(-in_features // group)
    scale = (torch.rand(out_features, groups) / 3).half()
    zero = None
    if zeros is not None:
        zero = torch.rand(out_features, groups) * 15
        zero = zero.round() if zeros == "whole" else zero
    places = torch.arange(in_features) // group
    offset = 8 if zero is None else zero.double()[:, places]
    check(Int4Linear(weight, scale, zero), (weight.double() - offset) * scale.double()[:, places], dtype, rows)


def test_a_row_does_not_depend_on_how_many_there_are():
    int8 = Int8Linear(torch.randint(-128, 128, (150, 1100), dtype=torch.int8), torch.rand(150))
    int4 = Int4Linear(torch.randint(0, 16, (150, 1100), dtype=torch.uint8), torch.rand(150, 35), torch.rand(150, 35))
    x = torch.randn(20, 1100)
    for product in (int8, int4):
        together = product(x)
        for count in (1, 3, 17):
            close(product(x[:count]), together[:count].double())
        assert product(x[:0]).shape == (0, 150)


def test_a_sum_is_divided_only_where_programs_are_few():
    def split(out_features: int, in_features: int) -> int:
        return linear.split_count(out_features, in_features // 128, torch.device("cpu"))

    assert split(128 * 264, 8192) == 1
    assert split(4096, 4096) == 8
    assert split(128, 128) == 1
    # at least as many blocks for each part as are loaded ahead
    assert split(128, 2048) == 4
