"""Norm, activation, edits of scores and moves of blocks, at odd sizes, with poisoned results."""

import pytest
import torch
from tolerance import close

from kvloom.ops.activation import silu_mul
from kvloom.ops.gpu import use_triton_everywhere
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.penalties import Edits, edit, restore

DTYPES = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch):
    """New memory holds NaN, or the largest integer, so that whatever a kernel leaves out is seen."""
    empty, empty_like = torch.empty, torch.empty_like
    monkeypatch.setattr(torch, "empty", lambda *args, **options: poison(empty(*args, **options)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **options: poison(empty_like(*args, **options)))


def poison(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.fill_(torch.nan if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 576])
@pytest.mark.parametrize("rows", [None, [4, 0, 0]], ids=["all", "some"])
def test_add_rms_norm(dtype, width, rows):
    residual, update = torch.randn(5, width) * 30, torch.randn(5, width).to(dtype)
    weight = torch.randn(width).to(dtype)
    index = None if rows is None else torch.tensor(rows)
    for added in (update, None):
        before = residual.clone()
        normed, total = add_rms_norm(residual, added, weight, 1e-5, index)
        expected = residual.double() + (0 if added is None else added.double())
        expected = expected if rows is None else expected[rows]
        assert total.dtype is torch.float32 and normed.dtype is dtype
        close(total, expected)
        close(normed, expected / (expected.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double())
        assert torch.equal(residual, before)


def test_norm_of_no_rows():
    normed, total = add_rms_norm(torch.randn(0, 8), torch.randn(0, 8), torch.ones(8), 1e-5)
    assert normed.shape == total.shape == (0, 8)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [1, 37, 1024, 1500])
def test_silu_mul(dtype, width):
    gate_up = (torch.randn(3, 2 * width) * 8).to(dtype)
    gate_up[0, 0] = -100.0
    gate, up = gate_up.double().chunk(2, -1)
    close(silu_mul(gate_up), gate / (1 + (-gate).exp()) * up)
    assert silu_mul(gate_up[:0]).shape == (0, width)


def some_edits(rows: int, vocab: int, count: int) -> Edits:
    index = torch.randperm(rows * vocab)[:count]
    index[::7] = -1
    strength = torch.rand(count, dtype=torch.float64)
    return Edits(
        index=index,
        bias=torch.randn(count, dtype=torch.float64) * 20 * (torch.rand(count) < 0.5),
        repetition=torch.where(torch.rand(count) < 0.5, strength * 3 + 0.1, 1.0),
        subtracted=torch.randn(count, dtype=torch.float64) * 3 * (torch.rand(count) < 0.5),
        banned=torch.rand(count) < 0.2,
    )


@pytest.mark.parametrize("count", [0, 1, 255, 600])
def test_edits_are_those_of_the_single_ops_and_are_undone(count):
    scores = torch.randn(7, 131) * 10
    scores[0, :20] = 3e38
    before = scores.clone()
    edits = some_edits(7, 131, count)
    saved = edit(scores, edits)
    use_triton_everywhere(False)
    expected = before.clone()
    edit(expected, edits)
    assert torch.equal(scores, expected)
    assert count < 10 or (scores == -torch.inf).any()
    use_triton_everywhere(True)
    restore(scores, edits, saved)
    assert torch.equal(scores, before)
