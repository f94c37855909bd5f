"""Chooses tokens on a GPU in a few passes over the scores, without a sort and without waiting for the host.

All parameters are tensors with one number per row, and memory depends on shapes only, so a CUDA graph can record it. A
row's token does not depend on other rows or on the order of programs, because weights are integers.

There are four launches. In the first and the third, each tile of ``TILE`` scores of a row is one program.

1. ``survey`` finds each tile's largest score and sums of exp, and the largest score of every 32 neighbours (a group).
2. ``settle`` finds the most likely token. For top-k and top-p it also finds a bound on the tokens that may be sampled.
   For top-k it is the k-th largest of the groups' largest scores, which is at most the k-th largest score and usually
   close to it (bucketed selection, as in Chern et al., 2022). For top-p it comes from sums of these scores' weights.
3. ``collect`` computes the weights of the tiles and collects the few tokens within the bound.
4. ``draw`` finds the thresholds of top-k and top-p and then the token. It bisects over the bits of the scores and sums
   weights instead of sorting (as in radix selection: RadiK; AIR Top-K by Zhang et al., 2023). The tokens within the
   bound are in registers. If they are too many, since scores are flat, each bisection step reads the row again.
"""

from dataclasses import dataclass

import torch
import triton

from kvloom.ops.gpu import sampling_kernels as kernels
from kvloom.ops.gpu.penalties import edit, restore
from kvloom.ops.penalties import Edits

TILE = 4096
"""Scores per program. It is fixed, so that sums don't depend on the number of rows."""

GROUP = 32
FEW, MAX_FOUND = 1024, 8192
"""The two sizes for sampling in registers: enough for most rows, and the largest one."""

FINE, NOT_FINITE, STUCK = (int(state.value) for state in (kernels.FINE, kernels.NOT_FINITE, kernels.STUCK))
"""The states of a row: a token was chosen; some score is not finite; every score is -inf."""


@dataclass(frozen=True, slots=True)
class RowParams:
    """How each row's token is chosen; see ``kvloom.ops.sampling.sample``.

    Attributes:
        temperature: fp32 [R]; 0 is greedy and ignores the other parameters.
        min_p: fp32 [R].
        top_k: int64 [R]; the vocabulary's size for off.
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
        states: int32 [R], ``FINE``, ``NOT_FINITE`` or ``STUCK``. Only with ``FINE`` the token is meaningful.
        normalizers: fp32 [R], the log-sum-exp of each row of the raw logits.
    """

    tokens: torch.Tensor
    states: torch.Tensor
    normalizers: torch.Tensor


@dataclass(frozen=True, slots=True)
class Survey:
    """The results of ``survey`` per tile. Tensors are [R, tiles], ``groups`` is [R, tiles * TILE // GROUP]."""

    tops: torch.Tensor
    firsts: torch.Tensor
    sums: torch.Tensor
    tempered: torch.Tensor
    broken: torch.Tensor
    groups: torch.Tensor


def survey(scores: torch.Tensor, temperature: torch.Tensor | None) -> Survey:
    """The first pass over scores, fp32 [R, vocab]. ``temperature`` is fp32 [R], or None if all rows are greedy."""
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
    """Choose the next token of each row.

    Args:
        scores: fp32 [R, vocab] with contiguous rows. For 128-bit loads a row's stride must be a multiple of 16.
        params: how to choose each row's token; None if all rows are greedy.
        uniform: fp64 [R] in [0, 1), needed with ``params``.
        raw: a survey of the raw logits, if ``scores`` were edited after it. It decides about ``NOT_FINITE``.
    """
    found = survey(scores, None if params is None else params.temperature)
    return _choose(scores, params, uniform, found, raw or found)


def _choose(
    scores: torch.Tensor, params: RowParams | None, uniform: torch.Tensor | None, found: Survey, raw: Survey
) -> Choice:
    """The second to fourth launch of ``choose``."""
    rows, vocab = scores.shape
    tiles = triton.cdiv(vocab, TILE)
    choice = Choice(
        scores.new_empty(rows, dtype=torch.int64), scores.new_empty(rows, dtype=torch.int32), scores.new_empty(rows)
    )
    if not rows:
        return choice
    # Without parameters the kernel does not read them
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
    """The third and fourth launch. In rows with a temperature the sampled token replaces the most likely one."""
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
    # Scores may be -inf here
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
