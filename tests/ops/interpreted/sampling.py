"""Tokens are those of the torch ops on the same uniforms; tiles are small, so that every way through is taken."""

import pytest
import torch

from kvloom.ops import sampling
from kvloom.ops.gpu import sampling as fused
from kvloom.ops.gpu import use_triton_everywhere
from kvloom.ops.penalties import Edits
from kvloom.ops.sampling import NOT_FINITE, STUCK, finite, greedy, sample, sample_tokens

# tile, group, most tokens in registers on the short and on the long way
SIZES = [(64, 4, 8, 32), (128, 32, 16, 128), (512, 8, 64, 512)]


@pytest.fixture(autouse=True)
def _small_and_poisoned(monkeypatch):
    use_sizes(monkeypatch, SIZES[0])
    new_empty = torch.Tensor.new_empty

    def poisoned(self, *args, **options):
        made = new_empty(self, *args, **options)
        return made.fill_(torch.nan if made.is_floating_point() else torch.iinfo(made.dtype).max)

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)


def use_sizes(monkeypatch, sizes: tuple[int, ...]) -> None:
    for name, size in zip(("TILE", "GROUP", "FEW", "MAX_FOUND"), sizes, strict=True):
        monkeypatch.setattr(fused, name, size)


def by_torch(op, *args):
    use_triton_everywhere(False)
    try:
        return op(*args)
    finally:
        use_triton_everywhere(True)


def parameters(rows: int, vocab: int) -> tuple[torch.Tensor, ...]:
    """Temperature, min_p, top_k, top_p and uniform of rows in which each is off and on."""

    def one_of(*choices: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(choices, dtype=dtype)[torch.randint(len(choices), (rows,))]

    return (
        torch.rand(rows) * 2.7 + 0.3,
        one_of(0, 0, 0.01, 0.2),
        one_of(*(min(k, vocab) for k in (1, 5, 40, 100)), vocab, vocab, vocab, dtype=torch.int64),
        one_of(1, 1, 0.1, 0.9, 0.999),
        torch.rand(rows, dtype=torch.float64),
    )


def edges_near(scores, temperature, min_p, top_k, top_p, uniform) -> torch.Tensor:
    """Whether a row's token is within rounding of being another one; float64, all sorted."""
    vocab = scores.shape[1]
    below = (scores.double() - scores.amax(-1, keepdim=True).double()) / temperature.double()[:, None]
    weights = below.exp().masked_fill(below.exp() < min_p.double()[:, None], 0)
    near = torch.zeros(len(scores), dtype=torch.bool)
    for row in range(len(scores)):
        ranked = top_k[row] < vocab or top_p[row] < 1
        w = weights[row].sort(descending=True, stable=True).values[: top_k[row]] if ranked else weights[row]
        cumulative = w.cumsum(0) / w.sum()
        if top_p[row] < 1:
            near[row] = (cumulative - top_p[row].double()).abs().min() < 1e-6
            kept = int((cumulative < top_p[row].double()).sum()) + 1
            cumulative = cumulative[:kept] / cumulative[kept - 1]
        near[row] |= (cumulative - uniform[row]).abs().min() < 1e-6
    return near


def compare(scores: torch.Tensor, params: tuple[torch.Tensor, ...]) -> None:
    drawn, expected = sample(scores, *params), by_torch(sample, scores, *params)
    clear = ~edges_near(scores, *params)
    assert clear.sum() > 0.9 * len(scores)
    assert drawn[clear].tolist() == expected[clear].tolist()


@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("vocab", [1, 63, 300])
@pytest.mark.parametrize("ties", [False, True], ids=["distinct", "ties"])
def test_draws_are_those_of_torch(monkeypatch, sizes, vocab, ties):
    use_sizes(monkeypatch, sizes)
    scores = torch.randn(8, vocab) * torch.tensor([0.3, 2, 6])[torch.randint(3, (8, 1))]
    scores = scores.round(decimals=1) if ties else scores
    if vocab > 1:
        scores[:, torch.randperm(vocab)[: vocab // 8]] = -torch.inf
    compare(scores, parameters(8, vocab))


@pytest.mark.full
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("sizes", [*SIZES, (4096, 32, 1024, 8192)], ids=str)
def test_draws_are_those_of_torch_at_length(monkeypatch, sizes, seed):
    use_sizes(monkeypatch, sizes)
    torch.manual_seed(seed)
    vocab = 700 + seed * 297
    scores = (torch.randn(24, vocab) * torch.tensor([0.3, 2, 6])[torch.randint(3, (24, 1))]).round(decimals=seed + 1)
    scores[:, torch.randperm(vocab)[: vocab // 8]] = -torch.inf
    compare(scores, parameters(24, vocab))


@pytest.mark.parametrize("way", ["by id", "by rank"])
def test_uniforms_are_inverted_exactly(way):
    """A grid of uniforms gives each token as often as float64 says: the distribution, without chance."""
    vocab, n = 30, 60
    scores = (torch.randn(vocab) * 2).round(decimals=1)
    scores[15:18] = -torch.inf
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ones = torch.ones(n)
    top_k = torch.full((n,), vocab if way == "by id" else 12)
    drawn = sample(scores.expand(n, -1).contiguous(), ones, ones * 0, top_k, ones, grid)
    weights = scores.double().exp()
    if way == "by rank":
        weights[weights.sort(descending=True, stable=True).indices[12:]] = 0
    counts = torch.bincount(drawn, minlength=vocab)
    assert (counts - weights / weights.sum() * n).abs().max() < 1.01
    assert (counts[weights == 0] == 0).all()


@pytest.mark.parametrize("uniform", [0.0, 2.0**-53, 1 - 2.0**-53])
@pytest.mark.parametrize(("top_k", "top_p"), [(200, 1.0), (30, 1.0), (200, 0.9), (3, 1e-6)])
def test_no_uniform_draws_an_impossible_token(uniform, top_k, top_p):
    scores = torch.randn(3, 200)
    scores[:, :20] = scores[:, 180:] = -torch.inf
    ones = torch.ones(3)
    params = (ones, ones * 0, torch.full((3,), top_k), ones * top_p, torch.full((3,), uniform, dtype=torch.float64))
    drawn = sample(scores, *params)
    assert ((drawn >= 20) & (drawn < 180)).all()


def test_equal_scores_are_cut_by_id():
    n = 9
    grid = (torch.arange(n, dtype=torch.float64) + 0.5) / n
    ones = torch.ones(n)
    for vocab, top_k, top_p, kept in ((100, 7, 1.0, 7), (100, 100, 0.049, 5), (300, 150, 0.099, 15)):
        drawn = sample(torch.zeros(n, vocab), ones, ones * 0, torch.full((n,), top_k), ones * top_p, grid)
        assert drawn.tolist() == (grid * kept).long().tolist()


@pytest.mark.parametrize("temperature", [1e-45, 1e-30, 1e-6, 100.0])
def test_extreme_temperatures(temperature):
    scores = torch.randn(4, 150) * 50
    params = parameters(4, 150)
    heat = torch.full((4,), temperature)
    assert sample(scores, heat, *params[1:]).tolist() == by_torch(sample, scores, heat, *params[1:]).tolist()


def test_what_a_row_gets_does_not_depend_on_the_others():
    scores, params = torch.randn(9, 250) * 3, parameters(9, 250)
    together = sample(scores, *params)
    for row in range(9):
        one = slice(row, row + 1)
        assert torch.equal(sample(scores[one], *(p[one] for p in params)), together[one])


@pytest.mark.parametrize("vocab", [1, 64, 65, 301])
def test_greedy_takes_the_first_of_the_largest(vocab):
    scores = torch.randn(8, vocab).round(decimals=1)
    scores[3] = 7.0
    scores[4] = -torch.inf
    assert greedy(scores).tolist() == scores.numpy().argmax(1).tolist()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_finite(bad):
    logits = torch.randn(4, 150)
    logits[1, 0] = logits[2, 149] = bad
    assert finite(logits).tolist() == [True, False, False, True]


def test_rows_with_a_stride():
    scores = torch.randn(5, 320)[:, :301]
    params = parameters(5, 301)
    assert torch.equal(sample(scores, *params), sample(scores.contiguous(), *params))
    assert torch.equal(greedy(scores), greedy(scores.contiguous()))


def test_pick_does_all_at_once():
    rows, vocab = 12, 200
    logits = torch.randn(rows, vocab) * 4
    logits[2, 7] = torch.nan
    logits[5, 199] = torch.inf
    logits[6] = torch.nan
    before = logits.clone()
    temperature, *others = parameters(rows, vocab)
    temperature[::3] = 0
    temperature[1] = 1e-45
    # every token of row 8 is banned, and some places of others are edited
    index = torch.cat([8 * vocab + torch.arange(vocab), torch.tensor([-1, 3, 700, 701, 1500, -1])])
    count = len(index)
    edits = Edits(
        index,
        torch.randn(count, dtype=torch.float64) * 9,
        torch.rand(count, dtype=torch.float64) + 0.6,
        torch.randn(count, dtype=torch.float64),
        torch.arange(count) < vocab,
    )
    for edited in (None, edits):
        tokens, logprobs = sample_tokens(logits, temperature, *others, edited)
        assert torch.equal(logits.nan_to_num(1e9), before.nan_to_num(1e9))
        expected, _ = by_torch(sample_tokens, logits, temperature, *others, edited)
        assert tokens.tolist() == expected.tolist()
        assert tokens[[2, 5, 6]].tolist() == [NOT_FINITE] * 3
        assert (tokens[8] == STUCK) == (edited is not None)
        reference = before.double().log_softmax(-1)
        for row in range(rows):
            if tokens[row] >= 0:
                assert logprobs[row].item() == pytest.approx(reference[row, tokens[row]].item(), abs=1e-5)


def test_no_rows():
    empty = torch.empty(0)
    params = (empty, empty, empty.long(), empty, empty.double())
    assert sample(torch.empty(0, 100), *params).shape == greedy(torch.empty(0, 100)).shape == (0,)
    assert sampling.finite(torch.empty(0, 100)).shape == (0,)
