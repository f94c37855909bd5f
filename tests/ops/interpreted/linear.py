"""Products with weights of 8 and 4 bits against float64, at shapes that fill no block, with poisoned results."""

import pytest
import torch
from tolerance import close

from kvloom.ops.gpu.linear import QuantizedLinear, pack
from kvloom.ops.gpu.linear_splits import MAX_ROWS, max_parts_bytes, split_count

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


def unpack(words: torch.Tensor, planes: int, in_features: int) -> torch.Tensor:
    """Undo ``pack``: int8 where a word holds two numbers, uint8 where it holds four."""
    bits = 16 // planes
    numbers = torch.stack([words.to(torch.int32) >> bits * plane & 2**bits - 1 for plane in range(planes)], 2)
    numbers = numbers.permute(1, 0, 2, 3).reshape(words.shape[1], -1)[:, :in_features].to(torch.uint8).contiguous()
    return numbers.view(torch.int8) if planes == 2 else numbers


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
    ("out_features", "in_features", "rows"), [(64, 128, 1), (200, 300, 5), (3, 8, 17), (130, 1024, 2), (70, 96, 70)]
)
def test_int8(dtype, out_features, in_features, rows):
    values = torch.randint(-128, 128, (out_features, in_features), dtype=torch.int8)
    values[:, 0], values[0, -1] = -128, 127
    scales = (torch.rand(out_features, -(-in_features // 32)) / 50).half()
    check(QuantizedLinear(8, values, scales, None), values.double() * in_columns(scales, 32, in_features), dtype, rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", ["around 8", "minima"])
@pytest.mark.parametrize(
    ("group", "out_features", "in_features", "rows"),
    [(32, 64, 128, 1), (32, 130, 288, 5), (128, 200, 300, 17), (128, 3, 256, 2), (32, 130, 1024, 2), (32, 70, 96, 70)],
)
def test_int4(dtype, kind, group, out_features, in_features, rows):
    values = torch.randint(0, 16, (out_features, in_features), dtype=torch.uint8)
    scales = (torch.rand(out_features, -(-in_features // group)) / 3).half()
    minima = -8 * scales if kind == "around 8" else torch.randn_like(scales)
    weight = values.double() * in_columns(scales, group, in_features) + in_columns(minima, group, in_features)
    product = QuantizedLinear(4, values, scales, minima, group)
    check(product, weight, dtype, rows)
    # what lies around 8 has no minima to read
    assert product._minima == (kind == "minima")
    ids = torch.tensor([out_features - 1, 0, 2])
    close(product.rows(ids), weight[ids])


def in_columns(groups: torch.Tensor, group: int, in_features: int) -> torch.Tensor:
    """What belongs to groups, float64, for each of their inputs."""
    return groups.double()[:, torch.arange(in_features) // group]


def test_a_row_does_not_depend_on_how_many_there_are():
    values = torch.randint(0, 256, (150, 1100), dtype=torch.uint8)
    scales, minima = torch.rand(2, 150, 35).half()
    x = torch.randn(70, 1100)
    for product in (
        QuantizedLinear(8, values.view(torch.int8), scales, None),
        QuantizedLinear(4, values & 0xF, scales, minima),
    ):
        # more than a program's rows, whose sums are not divided
        together = product(x)
        for count in (1, 9, 17, 64):
            close(product(x[:count]), together[:count].double())
        assert product(x[:0]).shape == (0, 150)
        assert product.rows(torch.tensor([], dtype=torch.int64)).shape == (0, 1100)


def test_a_sum_is_divided_only_where_programs_are_few():
    def split(out_features: int, in_features: int) -> int:
        return split_count(out_features, in_features // 128, 132)

    assert split(128 * 264, 8192) == 1
    assert split(4096, 4096) == 8
    assert split(128, 128) == 1
    # at least as many blocks for each part as are loaded ahead
    assert split(128, 2048) == 4


@pytest.mark.parametrize("multiprocessors", [1, 20, 132, 304])
def test_no_product_has_more_parts_than_were_planned(multiprocessors):
    def parts(out_features: int, blocks: int) -> int:
        split = split_count(out_features, blocks, multiprocessors)
        return split * MAX_ROWS * out_features * 4 if split > 1 else 0

    most = max(parts(128 * columns, blocks) for columns in range(1, 700) for blocks in (8, 64, 500, 10_000))
    planned = max_parts_bytes(multiprocessors)
    assert 0.4 * planned < most <= planned
