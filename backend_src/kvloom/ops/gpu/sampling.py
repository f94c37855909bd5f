"""Choosing tokens on a GPU: a few passes over the scores, no sort, nothing that waits for the host.

All parameters are tensors with a number per row, memory depends on shapes alone, and so it can be captured in a graph.
What a row gets does not depend on its neighbours, nor on the order in which programs run: weights are integers.

The steps, one launch each, where tiles of ``TILE`` scores of a row are programs of their own in the first and third:

1. ``survey``: each tile's largest score and sums of exp; the largest score of every 32 neighbours.
2. ``settle``: the likeliest token. For top-k and top-p a bound on what could be drawn: the k-th largest of the groups'
   largest scores is no larger than the k-th largest score, and most often close to it (bucketed selection, as in Chern
   et al., 2022); what the largest ones of the groups sum up to does as much for top-p.
3. ``collect``: weights of the tiles; the few tokens within the bound.
4. ``draw``: the thresholds of top-k and top-p and then the token drawn, each found by bisecting over the bits of the
   scores (as radix selection does: RadiK, AIR Top-K by Zhang et al., 2023) with a sum of weights in place of a sort.
   The tokens within the bound are in registers; where they are too many, that is where scores are flat, each step of
   the bisection reads the row again.
"""

from dataclasses import dataclass

import torch
import triton

from kvloom.ops.gpu import sampling_kernels as kernels
from kvloom.ops.gpu.penalties import edit, restore
from kvloom.ops.penalties import Edits

TILE = 4096
"""Scores per program. Fixed, so that sums don't depend on the number of rows."""

GROUP = 32
FEW, MAX_FOUND = 1024, 8192
"""Tokens that are drawn from in registers: as many as there mostly are, and as many as there may be."""

FINE, NOT_FINITE, STUCK = (int(state.value) for state in (kernels.FINE, kernels.NOT_FINITE, kernels.STUCK))
"""States of a row: a token was chosen; its scores are not finite; every score is -inf."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each row's token is chosen; see ``kvloom.ops.sampling.sample``.

    Attributes:
        temperature: fp32 [R]; 0: the likeliest token is taken, and the other parameters don't matter.
        min_p: fp32 [R].
        top_k: int64 [R]; the vocabulary's size where it is off.
        top_p: fp32 [R].
    """

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor


@dataclass(frozen=True, slots=True)
class Choice:
    """The tokens chosen.

    Attributes:
        tokens: int64 [R].
        states: int32 [R], ``FINE``, ``NOT_FINITE`` or ``STUCK``; of the last two the token means nothing.
        normalizers: fp32 [R], log of the sum of exp over a row of the raw logits.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    normalizers: torch.Tensor


@dataclass(frozen=True, slots=True)
class Survey:
    """What ``survey`` finds in each tile; tensors of [R, tiles], ``groups`` of [R, tiles * TILE // GROUP]."""

    tops: torch.Tensor
    firsts: torch.Tensor
    sums: torch.Tensor
    tempered: torch.Tensor
    broken: torch.Tensor
    groups: torch.Tensor


def survey(scores: torch.Tensor, temperature: torch.Tensor | None) -> Survey:
    """The first pass over scores fp32 [R, vocab]; without ``temperature`` fp32 [R] what greedy choice needs."""
    assert scores.dtype is torch.float32 and scores.stride(1) == 1
    rows, vocab = scores.shape
    tiles = triton.cdiv(vocab, TILE)
    kept = temperature is not None
    floats = scores.new_empty(3, rows, tiles)
    integers = scores.new_empty(2, rows, tiles, dtype=torch.int32)
    groups = scores.new_empty(rows, tiles * (TILE // GROUP) if kept else 0)
    found = Survey(floats[0], integers[0], floats[1], floats[2], integers[1], groups)
    if rows:
        kernels.survey[(rows, tiles)](
            scores,
            scores.stride(0),
            vocab,
            temperature,
            found.tops,
            found.firsts,
            found.sums,
            found.tempered,
            found.broken,
            found.groups,
            TILE=TILE,
            GROUP=GROUP,
            SAMPLED=kept,
            num_warps=8,
        )
    return found


def choose(
    scores: torch.Tensor,
    params: RowParams | None,
    uniform: torch.Tensor | None = None,
    raw: Survey | None = None,
) -> Choice:
    """The next token of each row.

    Args:
        scores: fp32 [R, vocab], rows contiguous; left as they are. For 128-bit loads a row's stride must be a multiple
            of 16.
        params: how each row's is chosen; None: all are the likeliest ones.
        uniform: fp64 [R] in [0, 1); with ``params`` only.
        raw: a survey of the raw logits where ``scores`` were edited since; it decides on ``NOT_FINITE``.
    """
    found = survey(scores, None if params is None else params.temperature)
    return _choose(scores, params, uniform, found, raw or found)


def _choose(
    scores: torch.Tensor, params: RowParams | None, uniform: torch.Tensor | None, found: Survey, raw: Survey
) -> Choice:
    """As ``choose``, the first step being done."""
    rows, vocab = scores.shape
    tiles = triton.cdiv(vocab, TILE)
    choice = Choice(
        scores.new_empty(rows, dtype=torch.int64), scores.new_empty(rows, dtype=torch.int32), scores.new_empty(rows)
    )
    if not rows:
        return choice
    # without parameters the kernel reads none
    fields = (None,) * 4 if params is None else (params.temperature, params.min_p, params.top_k, params.top_p)
    peaks = scores.new_empty(rows)
    counters = scores.new_empty(2, rows, dtype=torch.int32)
    kernels.settle[(rows,)](
        found.tops,
        found.firsts,
        found.tempered,
        raw.tops,
        raw.sums,
        raw.broken,
        found.groups,
        *fields,
        vocab,
        tiles,
        choice.tokens,
        choice.states,
        choice.normalizers,
        peaks,
        counters[0],
        counters[1],
        TILES=triton.next_power_of_2(tiles),
        GROUPS=triton.next_power_of_2(tiles * (TILE // GROUP)),
        PER_TILE=TILE // GROUP,
        SAMPLED=params is not None,
        num_warps=16 if params is not None else 1,
    )
    if params is not None:
        assert uniform is not None
        _draw(scores, params, uniform, choice, peaks, counters[0], counters[1])
    return choice


def _draw(
    scores: torch.Tensor,
    params: RowParams,
    uniform: torch.Tensor,
    choice: Choice,
    peaks: torch.Tensor,
    cuts: torch.Tensor,
    found: torch.Tensor,
) -> None:
    """Steps three and four: put the token drawn in place of the likeliest in rows that have a temperature."""
    rows, vocab = scores.shape
    tiles = triton.cdiv(vocab, TILE)
    masses = scores.new_empty(rows, tiles, dtype=torch.int64)
    keys, ids = scores.new_empty(2, rows, MAX_FOUND, dtype=torch.int32)
    kernels.collect[(rows, tiles)](
        scores,
        scores.stride(0),
        vocab,
        params.temperature,
        params.min_p,
        params.top_k,
        params.top_p,
        choice.states,
        peaks,
        cuts,
        found,
        masses,
        keys,
        ids,
        TILE=TILE,
        MAX_FOUND=MAX_FOUND,
        num_warps=8,
    )
    kernels.draw[(rows,)](
        scores,
        scores.stride(0),
        vocab,
        params.temperature,
        params.min_p,
        params.top_k,
        params.top_p,
        uniform,
        choice.states,
        peaks,
        found,
        masses,
        tiles,
        keys,
        ids,
        choice.tokens,
        TILE=TILE,
        TILES=triton.next_power_of_2(tiles),
        FEW=FEW,
        MAX_FOUND=MAX_FOUND,
        num_warps=16,
    )


def finite(logits: torch.Tensor) -> torch.Tensor:
    """See ``kvloom.ops.sampling.finite``."""
    return survey(logits, None).broken.amax(-1) == 0


def greedy(scores: torch.Tensor) -> torch.Tensor:
    """See ``kvloom.ops.sampling.greedy``."""
    return choose(scores, None).tokens


def sample(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """See ``kvloom.ops.sampling.sample``."""
    found = survey(scores, temperature)
    # a score of -inf is as good as any other here
    found.broken.zero_()
    return _choose(scores, RowParams(temperature, min_p, top_k, top_p), uniform, found, found).tokens


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    edits: Edits | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See ``kvloom.ops.sampling.sample_tokens``."""
    params = RowParams(temperature, min_p, top_k, top_p)
    if edits is None:
        choice = choose(logits, params, uniform)
    else:
        raw = survey(logits, None)
        saved = edit(logits, edits)
        choice = choose(logits, params, uniform, raw)
        restore(logits, edits, saved)
    logprobs = torch.empty_like(choice.normalizers)
    if len(logprobs):
        kernels.finish[(len(logprobs),)](
            logits, logits.stride(0), choice.states, choice.normalizers, choice.tokens, logprobs, num_warps=1
        )
    return choice.tokens, logprobs
