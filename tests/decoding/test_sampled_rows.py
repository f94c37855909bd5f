"""Rows of a batch in the sampler: none touches another, one that fails fails alone, log probabilities are raw."""

import logging

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.decoding import sampler
from kvloom.decoding.sampler import choose
from kvloom.errors import Internal
from kvloom.request import Request, Sampled, SamplingParams, Sequence

pytestmark = pytest.mark.usefixtures("torch_or_native")


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
