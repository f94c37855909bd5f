"""Draws in C++ and in torch: the same token, and the one that float64 says, whatever the scores and parameters."""

from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.ops import native
from kvloom.ops.logprobs import token_logprobs
from kvloom.ops.native import stop_using_native
from kvloom.ops.sampling import sample
from support.compiled import use_compiled

MACHINES = ["native", "haswell"]

KINDS = ["normal", "steep", "steps", "equal", "close", "halved", "alone", "nothing"]


@pytest.fixture(autouse=True)
def _stop():
    yield
    stop_using_native()


@cache
def built(machine: str) -> object:
    use_compiled(machine)
    return native._library


def scores_of(kind: str, rows: int, vocab: int, rng: np.random.Generator) -> torch.Tensor:
    x = rng.normal(size=(rows, vocab)).astype(np.float32)
    if kind == "steep":
        x *= 30
    elif kind == "steps":
        x = (2 * x).round(1)
    elif kind == "equal":
        x *= 0  # of either sign
    elif kind == "close":
        x = 5 + x * 1e-6
    elif kind == "halved":
        x[x < 0] = -np.inf
    elif kind == "alone":
        x[:, :] = -np.inf
        x[:, vocab // 2] = 1e30
    elif kind == "nothing":
        x[:] = -np.inf
    return torch.from_numpy(x)


def columns(rows: list[tuple[float, float, int, float, float]]) -> list[torch.Tensor]:
    dtypes = (torch.float32, torch.float32, torch.int64, torch.float32, torch.float64)
    return [torch.tensor(column, dtype=dtype) for column, dtype in zip(zip(*rows, strict=True), dtypes, strict=True)]


def in_all_forms(scores: torch.Tensor, parameters: list[torch.Tensor]) -> list[int]:
    """What ``sample`` chooses, which must be the same in torch and in C++ for several machines."""
    stop_using_native()
    chosen = sample(scores, *parameters)
    for machine in MACHINES:
        native._library = built(machine)
        assert sample(scores, *parameters).tolist() == chosen.tolist(), machine
    return chosen.tolist()


def assert_right(token: int, scores: np.ndarray, temperature, min_p, top_k, top_p, uniform) -> None:
    """By the definition in float64 the token's share of [0, 1) holds the uniform, up to fp32's rounding."""
    if not np.isfinite(scores).any():
        assert token == 0
        return
    below = (scores.max() - scores) / np.float32(temperature)
    weights = np.exp(-below.astype(np.float64))
    if min_p:
        weights[below > -np.log(np.float32(min_p))] = 0
    ranked = top_k < len(scores) or top_p < 1
    order = np.argsort(below, kind="stable") if ranked else np.arange(len(scores))
    weights = weights[order]
    weights[top_k:] = 0
    place = int(np.flatnonzero(order == token)[0])
    assert weights[place] > 0
    shares = []
    for p in {np.float32(top_p) + error for error in (-1e-6, 0, 1e-6)} if top_p < 1 else {np.inf}:
        edges = np.cumsum(weights)
        kept = min(int(np.searchsorted(edges, p * edges[-1])), len(edges) - 1) if ranked else len(edges) - 1
        whole = edges[kept]
        if place <= kept:
            shares.append(((edges[place] - weights[place]) / whole, edges[place] / whole))
    assert any(low - 1e-6 <= uniform <= high + 1e-6 for low, high in shares), (shares, uniform)


UNIFORM = st.one_of(st.sampled_from([0.0, 0.5, 1 - 2.0**-53]), st.floats(0, 1, exclude_max=True))
ROW = st.tuples(
    st.sampled_from([1e-3, 0.1, 0.7, 1.0, 1.5, 100.0]),
    st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    st.sampled_from([1, 2, 7, 40, 300, 2**40, 2**40]),
    st.sampled_from([1e-7, 0.1, 0.5, 0.95, 0.999, 1 - 2.0**-24, 1.0, 1.0]),
    UNIFORM,
)


@settings(max_examples=150, deadline=None)
@given(
    rows=st.lists(ROW, min_size=1, max_size=5),
    kind=st.sampled_from(KINDS[:-1]),
    vocab=st.sampled_from([1, 2, 63, 64, 65, 255, 1000, 3001]),
    seed=st.integers(0, 2**32),
)
def test_the_token_is_the_one_that_float64_says(rows, kind, vocab, seed):
    rows = [(temperature, min_p, min(top_k, vocab), *rest) for temperature, min_p, top_k, *rest in rows]
    scores = scores_of(kind, len(rows), vocab, np.random.default_rng(seed))
    for row, (token, parameters) in enumerate(zip(in_all_forms(scores, columns(rows)), rows, strict=True)):
        assert_right(token, scores[row].numpy(), *parameters)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("vocab", [49_152, 200_001])
def test_forms_choose_the_same_of_a_real_vocabulary(kind, vocab):
    rng = np.random.default_rng(vocab)
    rows = [
        (0.8, 0.0, vocab, 1.0, rng.uniform()),
        (0.8, 0.05, vocab, 0.95, rng.uniform()),
        (100.0, 0.0, vocab, 0.9, rng.uniform()),
        (1.0, 0.0, 40, 1.0, rng.uniform()),
        (1e-30, 0.0, 40, 0.95, rng.uniform()),
        (1.0, 0.0, 1, 1.0, rng.uniform()),
        (2.0, 0.0, 9999, 0.999, rng.uniform()),
        (1.0, 0.0, vocab - 1, 1e-9, rng.uniform()),
    ]
    in_all_forms(scores_of(kind, len(rows), vocab, rng), columns(rows))


def test_rows_apart_from_each_other_are_read_where_they_lie():
    whole = scores_of("normal", 6, 1000, np.random.default_rng(1))
    rows = columns([(1.0, 0.0, 50, 0.9, 0.1 * row) for row in range(3)])
    assert in_all_forms(whole[::2, :701], rows) == in_all_forms(whole[::2, :701].clone(), rows)


@pytest.mark.parametrize("machine", [None, *MACHINES])
@pytest.mark.parametrize("kind", KINDS[:5])
@pytest.mark.parametrize("vocab", [1, 20, 65, 1281, 3000])
def test_log_probabilities_are_those_of_float64(machine, kind, vocab):
    if machine is not None:
        native._library = built(machine)
    logits = scores_of(kind, 7, vocab, np.random.default_rng(vocab))
    chosen = torch.arange(7) % vocab
    reference = logits.double().log_softmax(-1)
    for count in (0, 1, 20):
        own, values, ids = token_logprobs(logits, chosen, count)
        torch.testing.assert_close(own.double(), reference.gather(1, chosen[:, None])[:, 0], rtol=3e-7, atol=2e-6)
        # of equal ones the smaller id first
        expected = np.argsort(-logits.numpy(), kind="stable")[:, :count]
        assert ids.tolist() == expected.tolist()
        torch.testing.assert_close(values.double(), reference.gather(1, ids), rtol=3e-7, atol=2e-6)
