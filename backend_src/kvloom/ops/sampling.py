"""From scores to token ids; every row by its own parameters and independent of the others.

No step mixes rows: what a row gets is the same, bit for bit, in whatever batch it comes. (So nothing is summed over a
whole row at once: where rows are few, torch would split such a sum among threads.)
"""

import numpy as np
import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library
from kvloom.ops.penalties import Edits, edit

_BLOCK = 256
"""Tokens whose probabilities are summed first, to find the one that is drawn among them afterwards."""

_CANDIDATES = 256
"""Tokens that top-k and top-p look at first. They are nearly always enough and much cheaper than sorting them all."""


NOT_FINITE, STUCK = -1, -2
"""In a token's place: the row's logits are not all finite; none of its tokens is possible."""

_BELOW_ONE = 1 - 2.0**-53
"""The largest fp64 below 1."""


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether a row holds no NaN and no infinity: fp32 [R, vocab] to bool [R]."""
    if runs_triton(logits):
        from kvloom.ops.gpu.sampling import finite as fused

        return fused(logits)
    # two reductions that hand NaN on: 20 times cheaper than isfinite().all()
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()


def greedy(scores: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the first of equals: fp32 [R, vocab] to int64 [R]."""
    if runs_triton(scores):
        from kvloom.ops.gpu.sampling import greedy as fused

        return fused(scores)
    if scores.is_cpu:
        # numpy's is vectorized, and 10 times as fast as torch's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def likeliest(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``greedy`` and ``finite`` at once, in one pass where that can be: fp32 [R, vocab] to int64 [R] and bool [R].

    The token of a row that is not finite means nothing.
    """
    lib = library(logits)
    if lib is None or logits.dtype is not torch.float32 or not logits.is_contiguous():
        return greedy(logits), finite(logits)
    rows, vocab = logits.shape
    tokens, fine = empty(rows, dtype=torch.int64), empty(rows, dtype=torch.bool)
    lib.kvloom_likeliest(logits.data_ptr(), rows, vocab, tokens.data_ptr(), fine.data_ptr())
    return tokens, fine


def sample(
    scores: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution at ``uniform``.

    The order is temperature; min-p (Nguyen et al., 2024), which keeps what is at least ``min_p`` times as likely as the
    likeliest; top-k; top-p (nucleus sampling, Holtzman et al., 2019), which counts the probabilities that the others
    left, renormalized. Of equally likely tokens those with smaller ids count as likelier.

    Args:
        scores: fp32 [R, vocab]; not NaN, not +inf; -inf is never drawn unless a row has nothing else.
        temperature: fp32 [R], above 0.
        min_p: fp32 [R]; 0 where it is off.
        top_k: int64 [R]; the vocabulary's size where it is off.
        top_p: fp32 [R]; 1 where it is off.
        uniform: fp64 [R] in [0, 1).

    Returns:
        int64 [R].
    """
    if runs_triton(scores):
        from kvloom.ops.gpu.sampling import sample as fused

        return fused(scores, temperature, min_p, top_k, top_p, uniform)
    # the largest score becomes 0 before the division, so that no temperature, however small, can overflow it
    # (the clamp keeps NaN out of rows that have nothing but -inf)
    scores = scores - scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    scores /= temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    if (min_p > 0).any():
        scores.masked_fill_(scores < min_p.log()[:, None], -torch.inf)
    chosen = torch.empty(scores.shape[0], dtype=torch.int64, device=scores.device)
    ranked = (top_k < scores.shape[1]) | (top_p < 1)
    if not ranked.all():
        plain = ~ranked
        chosen[plain] = _sample_all(_rows(scores, plain), uniform[plain])
    if ranked.any():
        chosen[ranked] = _sample_ranked(_rows(scores, ranked), top_k[ranked], top_p[ranked], uniform[ranked])
    return chosen


def pick(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    edits: Edits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The next token of each row, whatever the row asks for; on a GPU without waiting for it.

    Args:
        logits: fp32 [R, vocab], contiguous. Changed on the way and put back.
        temperature: as ``sample``; below fp32's smallest normal number the likeliest token is taken.
        min_p: see there, and so for the following.
        top_k: see there.
        top_p: see there.
        uniform: see there.
        edits: made before.

    Returns:
        Tokens int64 [R], or ``NOT_FINITE`` or ``STUCK`` in their place; and the tokens' log probabilities under the
        logits as they came, fp32 [R], undefined where there is no token.
    """
    if runs_triton(logits):
        from kvloom.ops.gpu.sampling import pick as fused

        return fused(logits, temperature, min_p, top_k, top_p, uniform, edits)
    fine = finite(logits)
    scores = torch.where(fine[:, None], logits, 0.0)
    if edits is not None:
        edit(scores, edits)
    tiny = torch.finfo(torch.float32).tiny
    drawn = sample(scores, temperature.clamp(min=tiny), min_p, top_k, top_p, uniform)
    tokens = torch.where(temperature >= tiny, drawn, greedy(scores))
    logprobs = logits.log_softmax(-1).gather(1, tokens[:, None])[:, 0]
    tokens = torch.where(scores.amax(-1) == -torch.inf, STUCK, tokens)
    return torch.where(fine, tokens, NOT_FINITE), logprobs


def _sample_all(scores: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Draw from all tokens; arguments and result as of ``sample``, the scores' maximum being 0.

    Finds a block of tokens by the blocks' sums, then a token in it: fp64 sums up to every token of every row would be
    exact, too, but take 10 times as long.
    """
    vocab = scores.shape[1]
    weights = scores.exp()
    whole = vocab // _BLOCK * _BLOCK
    sums = [weights[:, :whole].unflatten(1, (-1, _BLOCK)).sum(-1)] if whole else []
    if whole < vocab:
        sums.append(weights[:, whole:].sum(-1, keepdim=True))
    cumulative = torch.cat(sums, dim=1).double().cumsum(-1)
    block = _search(cumulative, uniform, cumulative[:, -1:])[:, None]
    # where in the block the uniform lies is as uniform as itself
    edges = torch.nn.functional.pad(cumulative, (1, 0))
    low, high = edges.gather(1, block), edges.gather(1, block + 1)
    within = ((uniform[:, None] * edges[:, -1:] - low) / (high - low))[:, 0].clamp(0, _BELOW_ONE)
    tokens = block * _BLOCK + torch.arange(min(_BLOCK, vocab), device=scores.device)
    inside = weights.gather(1, tokens.clamp(max=vocab - 1)).double().masked_fill_(tokens >= vocab, 0).cumsum(-1)
    return (tokens[:, 0] + _search(inside, within, inside[:, -1:])).clamp(max=vocab - 1)


def _sample_ranked(
    scores: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw from the likeliest tokens; arguments and result as of ``sample``, the scores' maximum being 0."""
    vocab = scores.shape[1]
    count = min(_CANDIDATES, vocab)
    # the likeliest token's weight is exp(0), so its probability is one over the sum of all
    total = 1 / scores.softmax(-1).amax(-1).double()
    ranking = scores.topk(count).values
    value, rank, covered = _draw_rank(ranking, total, vocab, top_k, top_p, uniform)
    if not covered.all():
        rest = ~covered
        ranking = _descending(_rows(scores, rest))
        value[rest], rank[rest], _ = _draw_rank(ranking, total[rest], vocab, top_k[rest], top_p[rest], uniform[rest])
    # the token is the rank-th of those with this value, by id
    row, token = (scores == value[:, None]).nonzero(as_tuple=True)
    return token[torch.searchsorted(row, torch.arange(len(scores), device=scores.device)) + rank]


def _draw_rank(
    ranking: torch.Tensor,
    total: torch.Tensor,
    vocab: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw a place in a ranking of scores.

    Args:
        ranking: fp32 [R, n], a row's n largest scores, the largest first.
        total: fp64 [R], the sum of exp over all of a row's scores.
        vocab: how many scores a row has.
        top_k: as ``sample``, and so are the following.
        top_p: see there.
        uniform: see there.

    Returns:
        The score drawn, fp32 [R]; the number of equal scores before it, int64 [R]; and whether the n scores were
        enough to tell, bool [R].
    """
    count = ranking.shape[1]
    cumulative = ranking.double().exp_().cumsum(-1)
    limited = top_k < vocab
    at_top_k = cumulative.gather(1, (top_k.clamp(max=count) - 1)[:, None])[:, 0]
    # rounding must cut nothing where top-p is off
    nucleus = torch.where(top_p < 1, top_p.double() * torch.where(limited, at_top_k, total), torch.inf)
    # the token that takes the sum to the limit still belongs to the nucleus, and so the first always does
    kept = torch.searchsorted(cumulative, nucleus[:, None])[:, 0] + 1
    covered = torch.where(limited, top_k <= count, kept <= count) if count < vocab else torch.ones_like(limited)
    kept = kept.minimum(top_k).clamp(max=count)
    index = _search(cumulative, uniform, cumulative.gather(1, (kept - 1)[:, None]))[:, None]
    value = ranking.gather(1, index)
    first = torch.searchsorted(-ranking, -value)
    return value[:, 0], (index - first)[:, 0], covered


def _search(cumulative: torch.Tensor, uniform: torch.Tensor, total: torch.Tensor) -> torch.Tensor:
    """Index [R] at which ``cumulative`` fp64 [R, n] passes ``uniform`` fp64 [R] of ``total`` fp64 [R, 1]."""
    # no uniform below 1 rounds the product up to the total, so a token of no probability is never passed to
    index = torch.searchsorted(cumulative, uniform[:, None] * total, right=True)[:, 0]
    return index.clamp(max=cumulative.shape[1] - 1)


def _descending(scores: torch.Tensor) -> torch.Tensor:
    """Each row sorted, the largest first."""
    if scores.is_cpu:
        # numpy sorts values alone, torch always finds their places too: half as fast
        return torch.from_numpy(np.sort(scores.numpy(), axis=-1)).flip(-1)
    return scores.sort(dim=-1, descending=True).values


def _rows(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows that ``mask`` selects; no copy where that is all."""
    return tensor if mask.all() else tensor[mask]
