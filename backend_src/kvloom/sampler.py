"""Logits to tokens: the parameters of a step's rows, batched."""

import logging
from collections.abc import Collection, Iterable
from itertools import chain

import numpy as np
import torch

from kvloom.errors import Internal, InvalidArgument
from kvloom.ops.logprobs import token_logprobs
from kvloom.ops.penalties import add_bias, ban, penalize_counts, penalize_repetition
from kvloom.ops.sampling import greedy, likeliest, sample
from kvloom.request import Sampled, Sequence

log = logging.getLogger(__name__)

_COLDEST = torch.finfo(torch.float32).tiny
"""A temperature below it is 0 in fp32."""

_MOST_LOGPROBS = 20
"""The most alternatives a request may ask for. All rows look for so many: their order must not depend on neighbours."""


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A uniform number in [0, 1) per row from its seed and the position of the token to draw.

    Output number ``position`` of the SplitMix64 generator (Steele et al., 2014): no state to keep, so a draw depends
    on neither the neighbours nor what was recomputed.

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
"""What ``ops.sampling.likeliest`` returns."""


def choose(logits: torch.Tensor, sequences: list[Sequence], best: Likeliest | None = None) -> list[Sampled | Exception]:
    """The next token of each sequence, or what went wrong with that sequence alone.

    Args:
        logits: fp32 [R, vocab], a row per sequence; left as they are.
        sequences: R sequences whose known tokens are all computed.
        best: ``likeliest(logits)`` where that is known; its tokens are changed.
    """
    if not sequences:
        return []
    try:
        return _choose(logits, sequences, best)
    except Exception as error:  # noqa: BLE001 whatever one row does must not reach its neighbours
        if len(sequences) == 1:
            return [error]
        log.exception("sampling %d rows together failed; trying one by one", len(sequences))
        return [choose(logits[row : row + 1], [sequence])[0] for row, sequence in enumerate(sequences)]


def _choose(
    logits: torch.Tensor, sequences: list[Sequence], best: Likeliest | None = None
) -> list[Sampled | Exception]:
    tokens, fine = likeliest(logits) if best is None else best
    are_fine: list[bool] = fine.tolist()
    if not all(are_fine):
        rows = [row for row, ok in enumerate(are_fine) if ok]
        rest = iter(choose(logits[rows], [sequences[row] for row in rows]))
        return [next(rest) if ok else Internal("logits are not finite") for ok in are_fine]
    stuck: list[int] = []
    rows = [row for row, s in enumerate(sequences) if _drawn(s) or _edited(s)]
    if rows:
        index = torch.tensor(rows, device=logits.device)
        tokens[index], possible = _choose_edited_or_drawn(logits, index, [sequences[row] for row in rows])
        stuck = [row for row, ok in zip(rows, possible.tolist(), strict=True) if not ok]
    outcomes = _with_logprobs(logits, tokens, sequences)
    for row in stuck:
        outcomes[row] = InvalidArgument("bad_words", "every token is banned; none is left to choose")
    return outcomes


def _drawn(sequence: Sequence) -> bool:
    """Whether the token is drawn; the likeliest is taken where the temperature is 0, or is 0 in fp32."""
    return sequence.request.params.temperature >= _COLDEST


def _choose_edited_or_drawn(
    logits: torch.Tensor, rows: torch.Tensor, sequences: list[Sequence]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next tokens, int64 [n], of ``rows`` int64 [n]; and whether each is possible at all, bool [n]."""
    edited = any(map(_edited, sequences))
    scores = logits[rows] if len(rows) < len(logits) else logits.clone() if edited else logits
    if edited:
        _edit(scores, sequences)
    tokens = greedy(scores)
    drawn = [row for row, s in enumerate(sequences) if _drawn(s)]
    if drawn:
        index = torch.tensor(drawn, device=logits.device)
        tokens[index] = _draw(scores if len(drawn) == len(scores) else scores[index], [sequences[row] for row in drawn])
    return tokens, scores.gather(1, tokens[:, None])[:, 0] > -torch.inf


def _draw(scores: torch.Tensor, sequences: list[Sequence]) -> torch.Tensor:
    """Tokens int64 [R] drawn from scores fp32 [R, vocab] with the sequences' parameters and seeds."""
    return sample(scores, *(tensor.to(scores.device) for tensor in draw_parameters(sequences, scores.shape[1])))


def draw_parameters(sequences: list[Sequence], vocab: int) -> tuple[torch.Tensor, ...]:
    """What ``sample`` takes beside the scores, a row per sequence: temperature, min_p, top_k, top_p, uniform."""
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
    """Whether its next token follows from the logits and ``draw_parameters`` alone, and nothing else is asked."""
    return not _edited(sequence) and sequence.request.logprobs is None


def _edited(sequence: Sequence) -> bool:
    """Whether the next token is chosen from other scores than the model's own."""
    p = sequence.request.params
    return bool(
        p.repetition_penalty != 1
        or p.presence_penalty
        or p.frequency_penalty
        or p.logit_bias
        or sequence.banned
        or sequence.generated < p.min_tokens
    )


def _edit(scores: torch.Tensor, sequences: list[Sequence]) -> None:
    """Apply logit_bias, then the penalties, then the bans to scores fp32 [R, vocab], in place."""
    vocab, device = scores.shape[1], scores.device
    params = [sequence.request.params for sequence in sequences]

    def put(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(device)

    biases = [p.logit_bias for p in params]
    if any(biases):
        rows, tokens = _pairs(biases)
        values = np.fromiter(chain.from_iterable(bias.values() for bias in biases), np.float64, len(tokens))
        inside = tokens < vocab
        add_bias(scores, put((rows * vocab + tokens)[inside]), put(values[inside]))

    repeated = [s.tokens if p.repetition_penalty != 1 else () for s, p in zip(sequences, params, strict=True)]
    if any(repeated):
        rows, tokens = _pairs(repeated)
        strength = np.array([p.repetition_penalty for p in params])
        penalize_repetition(scores, put(rows * vocab + tokens), put(strength[rows]))

    counted = [
        s.tokens[len(s.request.prompt_ids) :] if p.presence_penalty or p.frequency_penalty else ()
        for s, p in zip(sequences, params, strict=True)
    ]
    if any(counted):
        rows, tokens = _pairs(counted)
        places, counts = np.unique(rows * vocab + tokens, return_counts=True)
        presence = np.array([p.presence_penalty for p in params])[places // vocab]
        frequency = np.array([p.frequency_penalty for p in params])[places // vocab]
        penalize_counts(scores, put(places), put(counts), put(presence), put(frequency))

    banned = [_banned(sequence) for sequence in sequences]
    if any(banned):
        rows, tokens = _pairs(banned)
        inside = tokens < vocab
        ban(scores, put((rows * vocab + tokens)[inside]))


def _banned(sequence: Sequence) -> list[int]:
    """The tokens that may not come next: last ones of bad words, and end tokens before min_tokens."""
    ids: list[int] = []
    tokens, generated = sequence.tokens, sequence.generated
    for length, after in sequence.banned.items():
        if length <= generated:
            ids += after.get(tuple(tokens[len(tokens) - length :]), ())
    if generated < sequence.request.params.min_tokens:
        ids += sequence.end_ids
    return ids


def _pairs(ids: Iterable[Collection[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Flatten each row's ids: rows and ids, int64 [N] both."""
    lengths = [len(row) for row in ids]
    rows = np.repeat(np.arange(len(lengths)), lengths)
    return rows, np.fromiter(chain.from_iterable(ids), np.int64, len(rows))


def _with_logprobs(logits: torch.Tensor, tokens: torch.Tensor, sequences: list[Sequence]) -> list[Sampled | Exception]:
    """The chosen tokens int64 [R], with log probabilities under logits fp32 [R, vocab] where they are wanted."""
    outcomes: list[Sampled | Exception] = [Sampled(token) for token in tokens.tolist()]
    rows = [row for row, sequence in enumerate(sequences) if sequence.request.logprobs is not None]
    if rows:
        wanted = [sequences[row].request.logprobs or 0 for row in rows]
        index = torch.tensor(rows, device=logits.device)
        own, top, top_ids = token_logprobs(
            logits if len(rows) == len(logits) else logits[index], tokens[index], _MOST_LOGPROBS if any(wanted) else 0
        )
        for row, count, token, logprob, values, ids in zip(
            rows, wanted, tokens[index].tolist(), own.tolist(), top.tolist(), top_ids.tolist(), strict=True
        ):
            outcomes[row] = Sampled(token, logprob, tuple(zip(ids[:count], values[:count], strict=True)))
    return outcomes
