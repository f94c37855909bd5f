"""Samples the next token of each sequence in a step, batched."""

import logging

import numpy as np
import torch

from kvloom.decoding.score_changes import ScoreChanges, join
from kvloom.errors import Internal, InvalidArgument
from kvloom.ops.logprobs import token_logprobs
from kvloom.ops.penalties import Edits, edit, restore
from kvloom.ops.sampling import argmax, sample
from kvloom.request import Sampled, Sequence

log = logging.getLogger(__name__)

_COLDEST = torch.finfo(torch.float32).tiny
"""A temperature below this counts as 0, because fp32 has no normal number for it."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A uniform number in [0, 1) per row, from its seed and the position of the token to sample.

    It is output number ``position`` of the SplitMix64 generator (Steele et al., 2014). There is no state to keep, so
    it does not depend on other sequences or on recomputation.

    Args:
        seeds: uint64 [R].
        positions: uint64 [R].

    Returns:
        float64 [R].
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


Likeliest = tuple[torch.Tensor, torch.Tensor]
"""The result of ``ops.sampling.argmax``."""


def choose(logits: torch.Tensor, sequences: list[Sequence], best: Likeliest | None = None) -> list[Sampled | Exception]:
    """Choose the next token of each sequence. An exception in place of a token affects that sequence only.

    Args:
        logits: fp32 [R, vocab], contiguous, one row per sequence. They are edited in place and restored.
        sequences: R sequences with all known tokens computed.
        best: ``argmax(logits)`` if it is known. Its tokens are overwritten.
    """
    if not sequences:
        return []
    try:
        return _choose(logits, sequences, best)
    except Exception as error:  # noqa: BLE001 one row's fault must not affect the others
        if len(sequences) == 1:
            return [error]
        log.exception("could not sample %d rows together; trying them one by one", len(sequences))
        return [choose(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]


def _choose(
    logits: torch.Tensor, sequences: list[Sequence], best: Likeliest | None = None
) -> list[Sampled | Exception]:
    tokens, fine = argmax(logits) if best is None else best
    are_fine: list[bool] = fine.tolist()
    if not all(are_fine):
        rows = [row for row, ok in enumerate(are_fine) if ok]
        rest = iter(choose(logits[rows], [sequences[row] for row in rows]))
        return [next(rest) if ok else Internal("logits are not finite") for ok in are_fine]
    stuck: list[int] = []
    edits = _edits(sequences, logits.shape[1])
    if edits is None:
        _draw(logits, tokens, sequences)
    else:
        edits = edits.to(logits.device)
        saved = edit(logits, edits)
        try:
            if not all(map(_drawn, sequences)):
                tokens, _ = argmax(logits)
            _draw(logits, tokens, sequences)
            stuck = (logits.gather(1, tokens[:, None])[:, 0] == -torch.inf).nonzero()[:, 0].tolist()
        finally:
            restore(logits, edits, saved)
    outcomes = _with_logprobs(logits, tokens, sequences)
    for row in stuck:
        outcomes[row] = InvalidArgument("bad_words", "every token is banned; none is left to choose")
    return outcomes


def _drawn(sequence: Sequence) -> bool:
    """Whether the sequence is sampled. With a temperature of 0, or 0 in fp32, it is greedy."""
    return sequence.request.params.temperature >= _COLDEST


def _draw(scores: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> None:
    """Sample from scores fp32 [R, vocab] and write to tokens int64 [R]. Greedy rows keep their tokens."""
    rows = [row for row, sequence in enumerate(sequences) if _drawn(sequence)]
    if rows:
        index = torch.tensor(rows, device=scores.device)
        parameters = draw_parameters([sequences[row] for row in rows], scores.shape[1])
        chosen = scores if len(rows) == len(scores) else scores[index]
        tokens[index] = sample(chosen, *(tensor.to(scores.device) for tensor in parameters))


def draw_parameters(sequences: list[Sequence], vocab: int) -> tuple[torch.Tensor, ...]:
    """The arguments of ``sample`` after the scores: temperature, min_p, top_k, top_p, uniform; one row per sequence."""
    params = [sequence.request.params for sequence in sequences]
    seeds = np.array([sequence.seed for sequence in sequences], dtype=np.uint64)
    positions = np.array([len(sequence.tokens) for sequence in sequences], dtype=np.uint64)
    return (
        torch.tensor([p.temperature for p in params], dtype=torch.float32),
        torch.tensor([p.min_p for p in params], dtype=torch.float32),
        torch.tensor([min(p.top_k, vocab) if p.top_k > 0 else vocab for p in params], dtype=torch.int64),
        torch.tensor([p.top_p or 1.0 for p in params], dtype=torch.float32),
        torch.from_numpy(uniforms(seeds, positions)),
    )


def plain(sequence: Sequence) -> bool:
    """Whether a sequence needs only the logits and ``draw_parameters``: no edits and no log probabilities."""
    return not _edited(sequence) and sequence.request.logprobs is None


def _edited(sequence: Sequence) -> bool:
    """Whether the model's logits are edited before the next token is chosen."""
    p = sequence.request.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or sequence.banned
        or sequence.generated < p.min_tokens
    )


def _edits(sequences: list[Sequence], vocab: int) -> Edits | None:
    """The edits of all rows' scores; None if there are none."""
    rows: dict[int, tuple[ScoreChanges, list[int]]] = {}
    for row, sequence in enumerate(sequences):
        if _edited(sequence):
            changes = sequence.changes
            if not isinstance(changes, ScoreChanges):
                changes = sequence.changes = ScoreChanges(sequence.request.params, sequence.request.prompt_ids, vocab)
            changes.follow(sequence.tokens)
            rows[row] = changes, changes.banned_entries(_banned(sequence))
    return join(rows, vocab) if rows else None


def _banned(sequence: Sequence) -> list[int]:
    """The tokens that may not come next: those that complete bad words, and end tokens before min_tokens."""
    ids: list[int] = []
    tokens, generated = sequence.tokens, sequence.generated
    for length, after in sequence.banned.items():
        if length <= generated:
            ids += after.get(tuple(tokens[len(tokens) - length :]), ())
    if generated < sequence.request.params.min_tokens:
        ids += sequence.end_ids
    return ids


def _with_logprobs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> list[Sampled | Exception]:
    """The chosen tokens, int64 [R]. Rows that ask for them get log probabilities under logits, fp32 [R, vocab]."""
    outcomes: list[Sampled | Exception] = [Sampled(token) for token in tokens.tolist()]
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.logprobs is not None]
    if rows:
        wanted = [sequences[row].request.logprobs or 0 for row in rows]
        index = torch.tensor(rows, device=logits.device)
        own, top, top_ids = token_logprobs(
            logits if len(rows) == len(logits) else logits[index], tokens[index], max(wanted)
        )
        for row, count, token, logprob, values, ids in zip(
            rows, wanted, tokens[index].tolist(), own.tolist(), top.tolist(), top_ids.tolist(), strict=True
        ):
            outcomes[row] = Sampled(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
    return outcomes
