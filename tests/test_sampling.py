"""Sampling: exact where it is greedy, distributed as asked where it is not, every row on its own."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MinPLogitsWarper, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from kvloom import sampler
from kvloom.errors import Internal
from kvloom.fetch import cache_folder
from kvloom.ops import sampling
from kvloom.ops.native import stop_using_native, use_native
from kvloom.ops.sampling import greedy, sample
from kvloom.request import Request, Sampled, SamplingParams, Sequence
from kvloom.sampler import choose, uniforms

VOCAB = 50


@pytest.fixture(params=["torch", "C++"], autouse=True)
def _form(request):
    if request.param == "C++":
        assert use_native(cache_folder("ops"))
    yield
    stop_using_native()


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


def sequence(logprobs=None, **params) -> Sequence:
    return Sequence(
        Request(id="", prompt_ids=(1, 2, 3), params=SamplingParams(**params), arrival=0.0, logprobs=logprobs)
    )


RANDOM_PARAMS = st.fixed_dictionaries(
    {"temperature": st.sampled_from([0.0, 0.0, 0.5, 1.0, 30.0])},
    optional={
        "seed": st.integers(0, 2**64 - 1),
        "top_p": st.sampled_from([0.0, 1e-6, 0.5, 0.95, 1.0]),
        "top_k": st.sampled_from([-1, 0, 1, 40, 300, 10**6]),
        "min_p": st.sampled_from([0.0, 0.01, 1.0]),
        "repetition_penalty": st.sampled_from([1e-40, 0.5, 1.0, 1.3, 10.0]),
        "presence_penalty": st.sampled_from([-2.0, 0.0, 1.5]),
        "frequency_penalty": st.sampled_from([-2.0, 0.0, 0.3]),
        "logit_bias": st.dictionaries(st.integers(0, 1100), st.floats(-100, 100), max_size=5),
        "min_tokens": st.sampled_from([0, 5, 50]),
    },
)


@st.composite
def random_sequence(draw):
    params = draw(RANDOM_PARAMS)
    made = sequence(draw(st.sampled_from([None, None, 0, 1, 20])), **params)
    made.tokens += draw(st.lists(st.integers(0, 999), max_size=40))
    made.end_ids = draw(st.sampled_from([frozenset(), frozenset({3}), frozenset({7, 2000})]))
    made.banned = draw(st.sampled_from([{}, {0: {(): (5, 6, 3000)}}, {1: {(made.tokens[-1],): (8,)}}]))
    return made


@settings(max_examples=100, deadline=None)
@given(
    rows=st.lists(random_sequence(), min_size=1, max_size=8),
    seed=st.integers(0, 2**32),
    nan=st.sampled_from([None, None, 0]),
    data=st.data(),
)
def test_rows_do_not_touch_each_other(rows, seed, nan, data):
    logits = torch.randn(len(rows), 1000, generator=torch.Generator().manual_seed(seed)) * 4
    if nan is not None:
        logits[nan, 17] = torch.nan
    before = logits.clone()
    together = choose(logits, rows)
    assert torch.equal(logits, before) or nan is not None
    for row, s in enumerate(rows):
        (alone,) = choose(logits[row : row + 1], [s])
        assert repr(alone) == repr(together[row])
        assert isinstance(alone, Internal if row == nan else Sampled)
    order = data.draw(st.permutations(range(len(rows))))
    shuffled = choose(logits[order], [rows[row] for row in order])
    assert [repr(outcome) for outcome in shuffled] == [repr(together[row]) for row in order]


@pytest.mark.parametrize("threads", [1, 2, 4])
@pytest.mark.parametrize("vocab", [49152, 151_936, 128_815])
def test_rows_do_not_touch_each_other_at_a_real_vocabulary(threads, vocab):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        torch.manual_seed(0)
        logits = torch.randn(12, vocab) * 3
        kinds = [
            {},
            {"top_p": 0.9},
            {"temperature": 5.0, "top_p": 0.9},
            {"min_p": 0.01},
            {"top_k": 40},
            {"top_k": 9999},
        ]
        rows = [sequence(logprobs=2, seed=row, **kinds[row % 6]) for row in range(12)]
        together = choose(logits, rows)
        assert [choose(logits[row : row + 1], [rows[row]])[0] for row in range(12)] == together
    finally:
        torch.set_num_threads(before)


def test_same_seed_draws_anew_at_each_position():
    logits = torch.zeros(1, 4096)
    s = sequence(seed=7)
    drawn = []
    for _ in range(50):
        drawn.append(choose(logits, [s])[0].id)
        s.tokens.append(drawn[-1])
    assert len(set(drawn)) > 40


def test_unseeded_sequences_differ():
    assert len({sequence().seed for _ in range(100)}) == 100


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(
    "params", [{"temperature": 0.0}, {"seed": 1}, {"seed": 1, "top_p": 0.5, "frequency_penalty": 1.0}]
)
def test_rows_that_are_not_finite_fail_alone(bad, params):
    torch.manual_seed(4)
    logits = torch.randn(4, 1000)
    rows = [sequence(logprobs=3, **params) for _ in range(4)]
    healthy = choose(logits, rows)
    logits[1, 999] = logits[3, 0] = bad
    outcomes = choose(logits, rows)
    assert [outcomes[0], outcomes[2]] == [healthy[0], healthy[2]]
    assert [str(outcomes[row]) for row in (1, 3)] == ["INTERNAL: logits are not finite"] * 2
    assert all(str(outcome) == "INTERNAL: logits are not finite" for outcome in choose(logits[[1, 3]], rows[:2]))


def test_no_rows_no_tokens():
    assert choose(torch.empty(0, 1000), []) == []


def test_an_exception_ends_its_row_only(monkeypatch, caplog):
    torch.manual_seed(6)
    logits = torch.randn(5, 1000)
    rows = [sequence(seed=row, top_p=0.9, logprobs=1) for row in range(5)]
    healthy = choose(logits, rows)
    rows[2].end_ids, rows[2].request = None, sequence(min_tokens=3).request
    with caplog.at_level(logging.ERROR):
        outcomes = choose(logits, rows)
    assert isinstance(outcomes[2], TypeError)
    assert outcomes[:2] + outcomes[3:] == healthy[:2] + healthy[3:]
    assert "one by one" in caplog.text

    def broken(*_):
        raise RuntimeError("no memory")

    monkeypatch.setattr(sampler, "sample", broken)
    rows = [sequence(temperature=0.0), sequence(), sequence(temperature=0.0)]
    outcomes = choose(logits[:3], rows)
    assert [type(outcome) for outcome in outcomes] == [Sampled, RuntimeError, Sampled]


def test_logprobs_are_those_of_the_raw_logits():
    torch.manual_seed(8)
    logits = torch.randn(4, 3000) * 5
    counts = [None, 0, 3, 20]
    rows = [
        sequence(logprobs=count, seed=1, temperature=3.0, repetition_penalty=2.0, logit_bias={5: 50.0})
        for count in counts
    ]
    reference = logits.double().log_softmax(-1)
    for row, (count, outcome) in enumerate(zip(counts, choose(logits, rows), strict=True)):
        if count is None:
            assert (outcome.logprob, outcome.top) == (None, ())
            continue
        assert outcome.logprob == pytest.approx(reference[row, outcome.id].item(), abs=2e-5)
        best = reference[row].topk(count)
        assert [token for token, _ in outcome.top] == best.indices.tolist()
        assert [value for _, value in outcome.top] == pytest.approx(best.values.tolist(), abs=2e-5)


def test_logprobs_of_few_and_of_equal_tokens():
    (outcome,) = choose(torch.zeros(1, 4), [sequence(logprobs=20, temperature=0.0)])
    assert outcome.top == tuple((token, pytest.approx(-np.log(4))) for token in range(4))
    assert outcome.id == 0


def test_which_equal_tokens_are_listed_does_not_depend_on_neighbours():
    logits = torch.randint(0, 3, (2, 1000), generator=torch.Generator().manual_seed(0)).float()
    few, many = sequence(logprobs=3, temperature=0.0), sequence(logprobs=20, temperature=0.0)
    assert choose(logits, [few, many])[0] == choose(logits[:1], [few])[0]
