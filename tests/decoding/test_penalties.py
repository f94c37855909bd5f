"""Penalties, bias and bans: what transformers and the APIs' definitions say, on the rows that asked for them only."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    MinNewTokensLengthLogitsProcessor,
    NoBadWordsLogitsProcessor,
    RepetitionPenaltyLogitsProcessor,
)

from kvloom.decoding import sampler
from kvloom.decoding.sampler import choose
from kvloom.errors import InvalidArgument
from kvloom.ops import penalties
from kvloom.ops.native import stop_using_native
from kvloom.request import Request, Sampled, SamplingParams, Sequence
from kvloom.text.bad_words import banned_tokens
from kvloom.text.tokenizer import Tokenizer
from support.compiled import use_compiled
from support.some_tokenizers import byte_level_metadata, default_tokenizer

VOCAB = 500


def sequence(prompt=(1, 2, 3), answer=(), banned=None, end_ids=(), **params) -> Sequence:
    params = {"temperature": 0.0, **params}
    made = Sequence(Request(id="", prompt_ids=tuple(prompt), params=SamplingParams(**params), arrival=0.0))
    made.tokens += answer
    made.banned, made.end_ids = banned or {}, frozenset(end_ids)
    return made


def edited(logits: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """The scores that tokens are chosen from."""
    scores = logits.clone()
    edits = sampler._edits(sequences, logits.shape[1])
    if edits is not None:
        penalties.edit(scores, edits)
    return scores


def histories(n=8, seed=0):
    """Prompts and answers with repeated tokens, some empty answers."""
    rng = np.random.default_rng(seed)
    return [
        (rng.integers(0, 60, rng.integers(1, 50)).tolist(), rng.integers(0, 60, rng.integers(0, 30)).tolist())
        for _ in range(n)
    ]


def random_logits(n=8, seed=0):
    return torch.randn(n, VOCAB, generator=torch.Generator().manual_seed(seed)) * 4


@pytest.mark.parametrize("penalty", [0.3, 0.99, 1.1, 2.0, 10.0])
def test_repetition_penalty_is_transformers(penalty):
    logits = random_logits()
    rows = [sequence(prompt, answer, repetition_penalty=penalty) for prompt, answer in histories()]
    expected = torch.cat(
        [
            RepetitionPenaltyLogitsProcessor(penalty)(torch.tensor([s.tokens]), logits[row : row + 1].clone())
            for row, s in enumerate(rows)
        ]
    )
    torch.testing.assert_close(edited(logits, rows), expected, rtol=3e-7, atol=0)


def openai(logits: np.ndarray, answer: list[int], presence: float, frequency: float) -> np.ndarray:
    """mu[j] - c[j] * frequency - float(c[j] > 0) * presence, in float64."""
    counts = np.bincount(answer, minlength=len(logits)) if answer else np.zeros(len(logits))
    return logits - counts * frequency - (counts > 0) * presence


@pytest.mark.parametrize(("presence", "frequency"), [(1.5, 0.0), (0.0, 0.7), (-2.0, 2.0), (0.3, -1.1)])
def test_presence_and_frequency_count_the_answer_only(presence, frequency):
    logits = random_logits()
    rows = [
        sequence(prompt, answer, presence_penalty=presence, frequency_penalty=frequency)
        for prompt, answer in histories()
    ]
    expected = [
        openai(logits[row].double().numpy(), answer, presence, frequency) for row, (_, answer) in enumerate(histories())
    ]
    torch.testing.assert_close(edited(logits, rows).double(), torch.tensor(np.array(expected)), rtol=1e-7, atol=0)


def test_logit_bias_is_added():
    logits = random_logits()
    rows = [sequence(logit_bias={row: -100.0, 499: 7.5, 0: 0.25}) for row in range(1, 9)]
    expected = logits.double()
    for row, s in enumerate(rows):
        for token, bias in s.request.params.logit_bias.items():
            expected[row, token] += bias
    assert torch.equal(edited(logits, rows), expected.float())


def test_everything_together_in_the_documented_order():
    rng = np.random.default_rng(5)
    logits = random_logits()
    rows, expected = [], []
    for row, (prompt, answer) in enumerate(histories()):
        bias = {int(token): float(rng.normal() * 5) for token in rng.integers(0, VOCAB, 4)}
        repetition, presence, frequency = rng.uniform(0.5, 2), rng.uniform(-2, 2), rng.uniform(-2, 2)
        rows.append(
            sequence(
                prompt,
                answer,
                {0: {(): (9,)}},
                {11},
                logit_bias=bias,
                repetition_penalty=repetition,
                presence_penalty=presence,
                frequency_penalty=frequency,
                min_tokens=15,
            )
        )
        values = logits[row].double().numpy()
        values[list(bias)] += list(bias.values())
        seen = list({*prompt, *answer})
        values[seen] = np.where(values[seen] > 0, values[seen] / repetition, values[seen] * repetition)
        values = openai(values, answer, presence, frequency)
        values[9] = -np.inf
        if len(answer) < 15:
            values[11] = -np.inf
        expected.append(values)
    expected = torch.tensor(np.array(expected))
    torch.testing.assert_close(edited(logits, rows).double(), expected, rtol=1e-6, atol=1e-6)
    assert [outcome.id for outcome in choose(logits, rows)] == expected.argmax(-1).tolist()


def test_draws_follow_the_edited_distribution():
    params = {"temperature": 1.0, "frequency_penalty": 1.0, "logit_bias": {2: 1.0}}
    rows = [sequence([4], [0, 0, 1], {0: {(): (5,)}}, seed=seed, **params) for seed in range(5000)]
    counts = np.bincount([outcome.id for outcome in choose(torch.zeros(5000, 6), rows)], minlength=6)
    expected = np.exp([-2.0, -1.0, 1.0, 0.0, 0.0, -np.inf])
    np.testing.assert_allclose(counts / 5000, expected / expected.sum(), atol=0.03)
    assert counts[5] == 0


def test_penalties_of_one_row_leave_its_neighbours_alone():
    # H11: X asks for no penalties and is shorter than Y
    logits = random_logits(4)
    plain = sequence([7], [7, 7, 0, 0])
    heavy = [sequence(range(40), [0] * 50 + [7] * 20, frequency_penalty=1.05) for _ in range(3)]
    assert choose(logits, [plain, *heavy])[0] == choose(logits[:1], [plain])[0]
    assert torch.equal(edited(logits, [plain, *heavy])[0], logits[0])
    assert torch.equal(edited(logits, [plain, *heavy])[2], edited(logits[2:3], heavy[:1])[0])


def test_extreme_edits_stay_finite():
    logits = torch.full((1, 8), 3e38)
    logits[0, 4:] = -3e38
    for penalty in (1e-300, 1e-40, 10.0):
        s = sequence(range(8), [1, 5], repetition_penalty=penalty, frequency_penalty=-2.0)
        assert edited(logits, [s]).isfinite().all()
        for temperature in (0.0, 1e-300, 1.0, 100.0):
            drawn = sequence(range(8), [1, 5], repetition_penalty=penalty, temperature=temperature, top_p=0.9)
            assert isinstance(choose(logits, [drawn])[0], Sampled)


def test_bad_words_are_transformers():
    rng = np.random.default_rng(1)
    words = [[5], [7, 8], [7, 9], [1, 2, 3], [2, 3], [3, 3, 3, 4]]
    banned = {}
    for *before, last in words:
        after = banned.setdefault(len(before), {})
        after[tuple(before)] = (*after.get(tuple(before), ()), last)
    answers = [rng.integers(0, 10, n).tolist() for n in rng.integers(0, 12, 60)]
    answers += [[7], [1, 2], [3, 3, 3], [0, 1, 2], [2]]
    logits = random_logits(len(answers))
    rows = [sequence([1, 2, 7], answer, banned) for answer in answers]
    processor = NoBadWordsLogitsProcessor(words)
    expected = torch.cat(
        [
            processor(torch.tensor([answer], dtype=torch.int64), logits[row : row + 1].clone())
            for row, answer in enumerate(answers)
        ]
    )
    result = edited(logits, rows)
    assert torch.equal(result, expected)
    assert len({tuple(row.isinf().nonzero()[:, 0].tolist()) for row in result}) >= 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_is_transformers(temperature):
    logits = random_logits(6)
    logits[:, 11] = logits[:, 12] = 50.0
    for generated in (0, 1, 4, 5, 6):
        rows = [sequence([1, 2], [9] * generated, end_ids={11, 12}, min_tokens=5) for _ in range(6)]
        processor = MinNewTokensLengthLogitsProcessor(2, 5, [11, 12])
        expected = processor(torch.tensor([rows[0].tokens]), logits.clone())
        assert torch.equal(edited(logits, rows), expected)
        drawn = [sequence([1, 2], [9] * generated, end_ids={11, 12}, min_tokens=5, temperature=temperature)] * 6
        assert all((outcome.id in (11, 12)) == (generated >= 5) for outcome in choose(logits, drawn))


@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 3, "min_p": 0.1}])
def test_a_row_with_every_token_banned_fails_alone(params, caplog):
    logits = random_logits(5)
    banned = {0: {(): tuple(range(VOCAB))}}
    rows = [sequence(banned=banned if row in (1, 4) else None, seed=1, **params) for row in range(5)]
    outcomes = choose(logits, rows)
    for row in (0, 2, 3):
        assert [outcomes[row]] == choose(logits[row : row + 1], [rows[row]])
    for failed in (outcomes[1], outcomes[4], *choose(logits[:1], [rows[1]])):
        assert isinstance(failed, InvalidArgument)
        assert str(failed) == "INVALID_ARG: bad_words: every token is banned; none is left to choose"
    assert "one by one" not in caplog.text


@settings(max_examples=60, deadline=None)
@given(
    params=st.fixed_dictionaries(
        {
            "repetition_penalty": st.sampled_from([1.0, 1.0, 0.5, 1.3]),
            "presence_penalty": st.sampled_from([0.0, 0.0, 1.5]),
            "frequency_penalty": st.sampled_from([0.0, 0.0, -0.7]),
            "logit_bias": st.dictionaries(st.integers(0, VOCAB + 5), st.floats(-9, 9), max_size=4),
            "min_tokens": st.sampled_from([0, 40]),
        }
    ),
    prompt=st.lists(st.integers(0, 30), min_size=1, max_size=40),
    answer=st.lists(st.integers(0, VOCAB - 1) | st.integers(0, 30), max_size=150),
    steps=st.lists(st.integers(0, 60), max_size=5),
)
def test_what_is_kept_from_step_to_step_changes_nothing(params, prompt, answer, steps):
    banned = {0: {(): (5, VOCAB)}, 1: {(3,): (8, 400), (4,): (9,)}}
    kept = sequence(prompt, (), banned, {11, 450}, **params)
    logits = random_logits(1)
    # steps bring no token where a sequence waits, or is computed again, and several where nobody asked in between
    for step in (*steps, len(answer)):
        kept.tokens += answer[kept.generated : kept.generated + step]
        fresh = sequence(prompt, answer[: kept.generated], banned, {11, 450}, **params)
        assert torch.equal(edited(logits, [kept]), edited(logits, [fresh]))


@pytest.mark.parametrize("machine", ["native", "haswell"])
@pytest.mark.parametrize("count", [0, 1, 255, 9000])
def test_edits_in_cpp_are_those_in_torch_and_are_undone(machine, count):
    torch.manual_seed(count)
    scores = torch.randn(9, 1031) * 10
    scores[0, :20], scores[1, :20] = 3e38, -3e38
    index = torch.randperm(scores.numel())[:count]
    index[::7] = -1
    edits = penalties.Edits(
        index=index,
        bias=torch.randn(count, dtype=torch.float64) * 20 * (torch.rand(count) < 0.5),
        repetition=torch.where(torch.rand(count) < 0.5, torch.rand(count, dtype=torch.float64) * 3 + 1e-3, 1.0),
        subtracted=torch.randn(count, dtype=torch.float64) * 3 * (torch.rand(count) < 0.5),
        banned=torch.rand(count) < 0.2,
    )
    expected, before = scores.clone(), scores.clone()
    undo = penalties.edit(expected, edits)
    use_compiled(machine)
    try:
        saved = penalties.edit(scores, edits)
        assert torch.equal(scores, expected)
        assert torch.equal(saved[index >= 0], undo[index >= 0])
        assert count < 255 or (scores == -torch.inf).any()
        penalties.restore(scores, edits, saved)
        assert torch.equal(scores, before)
    finally:
        stop_using_native()


def test_one_token_that_is_left_is_taken():
    banned = {0: {(): tuple(token for token in range(VOCAB) if token != 123)}}
    for params in ({}, {"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.9}, {"temperature": 5.0, "top_k": 400}):
        assert choose(random_logits(1), [sequence(banned=banned, **params)]) == [Sampled(123)]


def test_ids_outside_the_vocabulary_do_nothing():
    logits = random_logits(2)
    odd = sequence(
        banned={0: {(): (VOCAB, 2**40)}}, end_ids={VOCAB + 5}, min_tokens=3, logit_bias={VOCAB: 100.0, 2**70: 100.0}
    )
    plain = sequence()
    assert choose(logits, [odd, plain]) == choose(logits, [plain, plain])
    # of the first row, a place in the second one; of the second row, one behind the scores
    penalized = sequence(prompt=(VOCAB + int(logits[1].argmax()),), repetition_penalty=10.0)
    assert choose(logits, [penalized, plain]) == choose(logits, [plain, penalized]) == choose(logits, [plain, plain])


@pytest.mark.parametrize("make", [default_tokenizer, lambda: Tokenizer.from_gguf(byte_level_metadata("gpt-2"))])
def test_bad_words_are_tokenized_with_and_without_a_space(make):
    tokenizer = make()
    banned = banned_tokens(tokenizer, ["the", " cache", "is where the", "\n", " "])
    forms = {(*before, last) for after in banned.values() for before, lasts in after.items() for last in lasts}
    texts = ["the", " the", "cache", " cache", "is where the", " is where the", "\n", " \n", " "]
    assert forms == {tuple(tokenizer.encode_piece(text, "")) for text in texts}
    assert all(len(before) == length for length, after in banned.items() for before in after)
    assert banned_tokens(tokenizer, []) == {}


def test_bad_words_must_be_valid_unicode():
    with pytest.raises(InvalidArgument, match="bad_words: character 1 is U"):
        banned_tokens(default_tokenizer(), ["a\ud800"])
