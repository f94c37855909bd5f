"""Products with quantized weights, in torch and in C++ with every set of instructions, against float64 at odd sizes."""

import math
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from kvloom.ops.linear import Weight, concat_rows, pack_gated_linear, pack_linear, pack_rows, pack_tied_linear
from kvloom.ops.linear_float import BLOCK_ROWS
from kvloom.ops.linear_groups import GROUP, GroupedWeight
from kvloom.ops.linear_int8 import WIDE_GROUP, Int8Weight
from kvloom.ops.native import stop_using_native
from support.compiled import use_compiled

SHAPES = [(960, 576), (48, 1536), (7, 33), (33, 6)]
"""[out, in]: multiples of everything, a panel and a half, of nothing at all."""

ROUNDING = {torch.float32: 2e-6, torch.bfloat16: 4e-3}
"""Of a sum, and of what comes out."""


@pytest.fixture(params=["torch", "C++", "C++ for AVX2"], autouse=True)
def form(request) -> Iterator[str]:
    torch.manual_seed(1)
    if request.param != "torch":
        machine = "haswell" if "AVX2" in request.param else "native"
        use_compiled(machine)
    yield request.param
    stop_using_native()


def four_bits(rows: int, width: int) -> GroupedWeight:
    padded = -(-width // GROUP) * GROUP
    values = torch.randint(0, 16, (rows, padded), dtype=torch.uint8)
    scales, minima = torch.rand(rows, padded // GROUP).half() / 50, torch.randn(rows, padded // GROUP).half() / 10
    scales[0, 0] = 3e-7  # a subnormal number of fp16
    return GroupedWeight(4, values, scales, minima, width)


def make(kind: str, rows: int, width: int) -> tuple[Weight, torch.Tensor]:
    """A weight, and the same in float64."""
    if kind in ("fp32", "bf16"):
        plain = torch.randn(rows, width).to({"fp32": torch.float32, "bf16": torch.bfloat16}[kind])
        return plain, plain.double()
    group = INT8_GROUPS.get(kind, GROUP)
    groups = four_bits(rows, width) if kind == "int4" else GroupedWeight.quantize(torch.randn(rows, width), group)
    assert groups.group == group
    exact = groups.values.double() * groups.scales.double().repeat_interleave(group, 1)
    if groups.minima is not None:
        exact += groups.minima.double().repeat_interleave(group, 1)
    return Int8Weight(groups) if kind in INT8_GROUPS else groups, exact[:, :width]


def rounded(x: torch.Tensor, group: int) -> torch.Tensor:
    """Activations as INT8 in groups has them, float64."""
    groups = torch.nn.functional.pad(x.double(), (0, -x.shape[1] % group)).view(len(x), -1, group)
    scales = groups.abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return ((groups / scales).round() * scales).view(len(x), -1)[:, : x.shape[1]]


INT8_GROUPS = {"w8a8": WIDE_GROUP, "w8a8's tables": GROUP}
"""Kinds with INT8 activations, and inputs that share a scale."""

QUANTIZED = ("int8", "int4", *INT8_GROUPS)
KINDS = [("fp32", torch.float32), ("bf16", torch.bfloat16)]
KINDS += [(kind, dtype) for kind in QUANTIZED for dtype in (torch.float32, torch.bfloat16)]


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(("rows", "width"), SHAPES)
def test_products(form, kind, dtype, rows, width):
    weight, exact = make(kind, rows, width)
    x = torch.randn(150, width).to(dtype)
    x[3] = 0.0
    linear = pack_linear(weight, dtype)
    whole = linear(x)
    assert whole.dtype is dtype
    inputs = x.double()
    tolerance = ROUNDING[dtype]
    if kind in INT8_GROUPS and form != "torch":  # torch does not round the rows
        inputs = rounded(x, INT8_GROUPS[kind])
        tolerance += 1e-3  # where the two halves of a step tie, fp32 may see another one
    expected = inputs @ exact.T
    if form == "torch" and kind in QUANTIZED and dtype is torch.bfloat16:
        tolerance *= 4  # groups are kept in bf16 there
    assert (whole.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert (whole[3] == 0).all()
    in_fp32 = linear(x, torch.float32)
    assert in_fp32.dtype is torch.float32
    assert (in_fp32 - whole.float()).abs().max() <= ROUNDING[dtype] * expected.abs().max()
    # what a row gives must not depend on how many rows there are
    for count in (*range(1, 15), 17, 32, 97, 144, 145):
        assert torch.equal(linear(x[:count].contiguous()), whole[:count]), count
    assert torch.equal(linear(x[100:101].contiguous()), whole[100:101])


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
@pytest.mark.parametrize(("rows", "width"), [(48, 192), (17, 33), (1, 6)])
def test_gated_products(form, kind, dtype, rows, width):
    gate, up = make(kind, rows, width), make(kind, rows, width)
    x = torch.randn(150, width).to(dtype)
    x[3] = 0.0
    gated = pack_gated_linear(concat_rows([gate[0], up[0]]), dtype)
    whole = gated(x)
    assert (whole.dtype, whole.shape) == (dtype, (150, rows))
    inputs = rounded(x, INT8_GROUPS[kind]) if kind in INT8_GROUPS and form != "torch" else x.double()
    gates, ups = inputs @ gate[1].T, inputs @ up[1].T
    expected = gates / (1 + (-gates).exp()) * ups
    if kind in ("fp32", "bf16") and form != "torch":
        # rounded once, at the end; beside it the errors of sums, which are in fp32 whatever the weights are
        sums = 2e-6 * (gates.abs().max() * ups.abs() + gates.abs() * ups.abs().max())
        error = (whole.double() - expected).abs()
        assert (error <= sums + ROUNDING[dtype] * expected.abs()).all()
    # gate and up are rounded, too
    tolerance = 4 * ROUNDING[dtype] * (4 if form == "torch" else 1) + 2e-3 * (kind in INT8_GROUPS)
    assert (whole.double() - expected).abs().max() <= tolerance * expected.abs().max()
    assert (whole[3] == 0).all()
    for count in (*range(1, 15), 17, 32, 97, 144, 145):
        assert torch.equal(gated(x[:count].contiguous()), whole[:count]), count
    assert torch.equal(gated(x[100:101].contiguous()), whole[100:101])


@pytest.mark.parametrize("form", ["C++", "C++ for AVX2"], indirect=True)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gates_that_are_far_out(form, dtype):
    """Closed and open ones, at which e^-gate leaves the range of fp32; what is not finite stays in its row."""
    gates = torch.tensor([-1e6, -1e4, -200, -88, -30, -1, 0, 1, 30, 88, 200, 1e4, 1e6])
    weight = torch.ones(40, 1)
    x = gates[:, None].to(dtype)
    gated = pack_gated_linear(torch.cat([weight, weight / 2**10]).to(dtype), dtype)
    y = gated(x).double()
    expected = x.double() / (1 + (-x.double()).exp()) * x.double() / 2**10
    assert torch.allclose(y, expected.expand(-1, 40), rtol=ROUNDING[dtype], atol=1e-25)
    x[1], x[2] = math.nan, math.inf
    again = gated(x).double()
    assert again[1].isnan().all() and not again[2].isfinite().any()
    assert torch.equal(again[3:], y[3:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_closed_gate_holds_back_what_is_large(form, dtype):
    x = torch.tensor([-80, -50, -30, -1])[:, None].to(dtype)
    weight, large = torch.ones(40, 1, dtype=dtype), torch.full((40, 1), 1e36, dtype=dtype)
    exact = x.double()
    expected = exact / (1 + (-exact).exp()) * exact * large[0].double()
    y = pack_gated_linear(torch.cat([weight, large]), dtype)(x).double()
    assert torch.allclose(y, expected.expand(-1, 40), rtol=ROUNDING[dtype], atol=0)


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_many_rows_are_each_as_if_there_were_few(form, kind, dtype):
    """With so many rows for each thread that it takes several passes over its own, the last of them no whole one."""
    weight, exact = make(kind, 70, 64)
    linear = pack_linear(weight, dtype)
    threads = torch.get_num_threads()
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            rows = 3 * 144 * count + 5
            x = torch.randn(rows, 64).to(dtype)
            whole = linear(x)
            for first in range(0, rows, 50):
                assert torch.equal(linear(x[first : first + 50].contiguous()), whole[first : first + 50]), first
    finally:
        torch.set_num_threads(threads)
    expected = x.double() @ exact.T
    tolerance = 2e-2 if kind in INT8_GROUPS else ROUNDING[dtype]
    assert (whole.double() - expected).abs().max() <= tolerance * expected.abs().max()


class Sizes(TorchDispatchMode):
    """Numbers of rows of the products that oneDNN is asked for."""

    def __init__(self):
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if "_linear_pointwise" in str(op):
            self.seen.add(args[0].shape[0])
        return op(*args, **(kwargs or {}))


@pytest.mark.parametrize("form", ["torch"], indirect=True)
@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_onednn_sees_one_number_of_rows(form, kind, dtype):
    """By which it chooses AMX or not, and the order of sums: what a row gives would depend on its neighbours."""
    weight, _ = make(kind, 40, 400)
    linear = pack_linear(weight, dtype)
    sizes = Sizes()
    with sizes:
        for rows in (1, 2, 15, 16, 17, 100):
            assert linear(torch.ones(rows, 400, dtype=dtype)).shape == (rows, 40)
    assert sizes.seen == {BLOCK_ROWS}


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_a_head_gives_the_embedding_back(form, kind, dtype):
    weight, exact = make(kind, 71, 70)
    ids = torch.tensor([70, 0, 33, 0, 15, 16, 64])
    rows = pack_tied_linear(weight, dtype).rows(ids)
    assert rows.dtype is torch.float32
    in_bf16 = form == "torch" and kind in QUANTIZED and dtype is torch.bfloat16
    assert (rows.double() - exact[ids]).abs().max() <= (1e-2 if in_bf16 else 1e-6) * exact.abs().max()
    if not isinstance(weight, torch.Tensor) and kind != "w8a8" and not in_bf16:  # whose tables are another kind
        assert torch.equal(rows, pack_rows(weight)(ids))


@pytest.mark.parametrize("kind", ["fp32", "bf16", *QUANTIZED])
def test_joined_weights_give_what_each_gives(kind):
    dtype = torch.float32 if kind == "fp32" else torch.bfloat16
    parts = [make(kind, rows, 64)[0] for rows in (5, 40, 3)]
    x = torch.randn(4, 64).to(dtype)
    joined = pack_linear(concat_rows(parts), dtype)(x)
    apart = torch.cat([pack_linear(part, dtype)(x) for part in parts], 1)
    assert (joined - apart).abs().max() <= ROUNDING[dtype] * apart.abs().max()


def test_one_outlier_costs_its_own_row_only():
    weight, _ = make("w8a8", 40, 64)
    x = torch.randn(9, 64)
    linear = pack_linear(weight, torch.float32)
    before = linear(x)
    x[4, 7] = float("nan")
    after = linear(x)
    others = [0, 1, 2, 3, 5, 6, 7, 8]
    assert torch.equal(after[others], before[others])


@pytest.mark.parametrize(("kind", "dtype"), KINDS)
def test_what_is_not_finite_stays_in_its_row(kind, dtype):
    weight, _ = make(kind, 40, 70)
    x = torch.randn(4, 70).to(dtype)
    x[1, 69], x[2, 3], x[3, 68] = math.nan, math.nan, math.inf
    got = pack_linear(weight, dtype)(x)
    assert got[0].isfinite().all()
    for row in (1, 2, 3):
        assert not got[row].isfinite().any(), row


def test_rounding_to_groups_is_ggufs():
    gguf = pytest.importorskip("gguf")
    weight = torch.randn(6, 96)
    weight[2, 32:64] = 0.0
    theirs = gguf.dequantize(
        gguf.quantize(weight.numpy(), gguf.GGMLQuantizationType.Q8_0), gguf.GGMLQuantizationType.Q8_0
    )
    assert torch.equal(GroupedWeight.quantize(weight).dequantize(), torch.from_numpy(theirs))
