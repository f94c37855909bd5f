"""Sampling: exact where it is greedy, distributed as asked where it is not, every row on its own."""

import numpy as np
import pytest
import torch
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvloom.decoding.sampler import uniforms
from kvloom.ops import sampling
from kvloom.ops.native import stop_using_native
from kvloom.ops.sampling import greedy, sample

VOCAB = 50

pytestmark = pytest.mark.usefixtures("torch_or_native")


def draw(logits, n, temperature=1.0, top_k=VOCAB, top_p=1.0, min_p=0.0, seed=0):
    """n draws from one row of logits."""
    row = torch.tensor(logits, dtype=torch.float32).expand(n, -1)
    return sample(
        row,
        torch.full((n,), temperature),
        torch.full((n,), min_p),
        torch.full((n,), top_k),
        torch.full((n,), top_p),
        torch.from_numpy(uniforms(np.full(n, seed, dtype=np.uint64), np.arange(n, dtype=np.uint64))),
    )


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float, min_p: float) -> np.ndarray:
    """The distribution asked for, in float64: temperature, then min-p, then top-k, then top-p."""
    scaled = np.exp((logits - logits.max()) / temperature)
    scaled[scaled < min_p] = 0
    order = np.argsort(-scaled, kind="stable")
    kept = order[:top_k]
    p = scaled[kept] / scaled[kept].sum()
    if top_p < 1:
        count = int(np.searchsorted(np.cumsum(p), top_p)) + 1
        kept, p = kept[:count], p[:count] / p[:count].sum()
    full = np.zeros_like(scaled)
    full[kept] = p
    return full


def assert_distributed(tokens: torch.Tensor, probability: np.ndarray) -> None:
    counts = np.bincount(tokens, minlength=len(probability))
    expected = probability * len(tokens)
    assert counts[expected == 0].sum() == 0
    inside = expected > 5
    chi2 = ((counts[inside] - expected[inside]) ** 2 / expected[inside]).sum()
    # mean k and deviation sqrt(2k) of a chi-squared variable; five deviations never happen by chance
    assert chi2 < inside.sum() + 5 * np.sqrt(2 * inside.sum())


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, VOCAB, 1.0, 0.0),
        (0.5, VOCAB, 1.0, 0.0),
        (2.0, VOCAB, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, VOCAB, 0.6, 0.0),
        (1.3, 8, 0.7, 0.0),
        (1.0, VOCAB, 1.0, 0.1),
        (1.7, 20, 0.9, 0.05),
        (2.0, VOCAB, 0.8, 0.2),
    ],
)
def test_draws_follow_the_distribution(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(size=VOCAB) * 2
    tokens = draw(logits, 40_000, temperature, top_k, top_p, min_p)
    assert_distributed(tokens, allowed(logits, temperature, top_k, top_p, min_p))


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 3000, 1.0, 0.0),
        (1.0, 3000, 0.9, 0.0),
        (50.0, 3000, 0.5, 0.0),
        (1.0, 100, 0.99, 0.0),
        (1.0, 700, 0.9, 0.01),
    ],
)
def test_draws_from_more_tokens_than_are_looked_at_first(temperature, top_k, top_p, min_p):
    logits = np.random.default_rng(3).normal(size=3000) * 2
    expected = allowed(logits, temperature, top_k, top_p, min_p)
    tokens = draw(logits, 4000, temperature, top_k, top_p, min_p)
    assert expected[tokens].min() > 0
    most = np.argsort(-expected)[:20]
    counts = np.bincount(tokens, minlength=3000)[most]
    assert (np.abs(counts - expected[most] * 4000) < 5 * np.sqrt(expected[most] * 4000) + 5).all()


@pytest.mark.parametrize(
    ("temperature", "min_p", "top_k", "top_p"),
    [(0.7, 0.0, 50, 1.0), (1.5, 0.0, 0, 0.9), (1.0, 0.05, 0, 1.0), (1.2, 0.02, 40, 0.8), (3.0, 0.0, 0, 0.99)],
)
def test_only_what_transformers_keeps_is_drawn_and_all_of_it(temperature, min_p, top_k, top_p):
    torch.manual_seed(11)
    logits = torch.randn(1, 2000) * 3
    kept = TemperatureLogitsWarper(temperature)(None, logits)
    for wanted, warper in (
        (min_p > 0, MinPLogitsWarper(min_p)),
        (top_k > 0, TopKLogitsWarper(top_k or 1)),
        (top_p < 1, TopPLogitsWarper(top_p)),
    ):
        kept = warper(None, kept) if wanted else kept
    probability = kept.double().softmax(-1)[0]
    # a fine grid of uniforms instead of random ones: every token likelier than its spacing must come
    n = 4000
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    drawn = sample(
        logits.expand(n, -1),
        torch.full((n,), temperature),
        torch.full((n,), min_p),
        torch.full((n,), top_k or 2000),
        torch.full((n,), top_p),
        grid,
    )
    counts = torch.bincount(drawn, minlength=2000)
    assert (counts[probability == 0] == 0).all()
    assert (counts - probability * n).abs().max() < 1.01


@pytest.mark.parametrize("vocab", [1, 2, 255, 256, 257, 511, 512, 1000])
@pytest.mark.parametrize("banned", [None, slice(200, 256), slice(256, None)], ids=str)
def test_uniforms_are_inverted_exactly(vocab, banned):
    logits = torch.randn(1, vocab, generator=torch.Generator().manual_seed(vocab)) * 2
    if banned is not None and banned.start < vocab:
        logits[:, banned] = -torch.inf
    n = 3000
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ones = torch.ones(n)
    drawn = sample(logits.expand(n, -1), ones, ones * 0, ones.long() * vocab, ones, grid)
    edges = logits[0].double().softmax(-1).cumsum(-1)
    expected = torch.searchsorted(edges, grid, right=True)
    # fp32 weights may move an edge past a uniform that lies next to it
    clear = (edges[:, None] - grid).abs().amin(0) > 1e-6
    assert clear.sum() > 0.9 * n
    assert torch.equal(drawn[clear], expected[clear])
    assert logits[0, drawn].isfinite().all()


def test_equal_scores_are_drawn_equally_and_cut_by_id():
    assert_distributed(draw(np.zeros(VOCAB), 20_000), np.full(VOCAB, 1 / VOCAB))
    assert set(draw(np.zeros(VOCAB), 2000, top_k=7).tolist()) == set(range(7))
    assert set(draw(np.zeros(2000), 4000, top_k=300).tolist()) == set(range(300))
    assert set(draw(np.zeros(2000), 2000, top_k=2000, top_p=0.01).tolist()) == set(range(20))


def test_first_look_and_full_sort_draw_the_same(monkeypatch):
    torch.manual_seed(2)
    logits = (torch.randn(64, 5000) * 2).round(decimals=1)  # with many ties
    rng = np.random.default_rng(0)
    params = [
        torch.from_numpy(column)
        for column in (
            rng.uniform(0.3, 2, 64).astype(np.float32),
            rng.choice([0, 0.01], 64).astype(np.float32),
            rng.choice([5, 100, 200, 1000, 5000], 64),
            rng.uniform(0.1, 0.99, 64).astype(np.float32),
            rng.uniform(0, 1, 64),
        )
    ]
    stop_using_native()
    quick = sample(logits, *params)
    for candidates in (1, 10, 5000):
        monkeypatch.setattr(sampling, "_CANDIDATES", candidates)
        assert sample(logits, *params).tolist() == quick.tolist()


@pytest.mark.parametrize("top_p", [1.0, 0.9])
@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 1 - 2.0**-53])
def test_no_uniform_draws_an_impossible_token(uniform, top_p):
    torch.manual_seed(1)
    logits = torch.randn(300, 999)
    logits[:, :100] = logits[:, 900:] = -torch.inf
    ones = torch.ones(300)
    drawn = sample(
        logits, ones, ones * 0, ones.long() * 999, ones * top_p, torch.full((300,), uniform, dtype=torch.float64)
    )
    assert ((drawn >= 100) & (drawn < 900)).all()


def test_uniforms_are_uniform_and_independent_of_each_other():
    u = uniforms(np.repeat(np.arange(200, dtype=np.uint64), 200), np.tile(np.arange(200, dtype=np.uint64), 200))
    assert ((u >= 0) & (u < 1)).all()
    assert len(np.unique(u)) == u.size
    assert np.abs(np.histogram(u, 20, (0, 1))[0] / u.size - 0.05).max() < 0.005
    grid = u.reshape(200, 200)
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.02
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.02


def test_uniforms_are_splitmix64():
    # the first outputs of the published generator for seed 1234567
    expected = [6457827717110365317, 3203168211198807973, 9817491932198370423]
    u = uniforms(np.full(3, 1234567, dtype=np.uint64), np.arange(3, dtype=np.uint64))
    assert u.tolist() == [(value >> 11) * 2.0**-53 for value in expected]


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-6])
def test_tiny_temperature_is_greedy(temperature):
    logits = np.random.default_rng(0).normal(size=VOCAB) * 50
    assert set(draw(logits, 200, temperature).tolist()) == {int(logits.argmax())}


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"), [(1, 1.0, 0.0), (VOCAB, 1e-9, 0.0), (1, 1e-9, 0.0), (VOCAB, 1, 1)]
)
def test_narrowest_filters_are_greedy(top_k, top_p, min_p):
    logits = np.random.default_rng(0).normal(size=VOCAB)
    assert set(draw(logits, 200, 1.0, top_k, top_p, min_p).tolist()) == {int(logits.argmax())}


def test_greedy_takes_the_largest_and_of_equals_the_first():
    logits = torch.randn(9, VOCAB)
    assert greedy(logits).tolist() == logits.double().numpy().argmax(1).tolist()
    assert greedy(torch.tensor([[0.0, 2, 2, 1], [3, 3, 3, 3]])).tolist() == [1, 0]
