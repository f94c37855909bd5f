"""Chooses a token for each row of scores, by the row's own parameters.

Rows are independent: on a CPU a row's token is the same in every batch, and the same in C++ and in torch.
"""

import numpy as np
import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library
from kvloom.ops.penalties import Edits, edit

_CANDIDATES = 256
"""Top-k and top-p look at this many tokens first. They nearly always suffice, and sorting all tokens is expensive."""


NOT_FINITE, STUCK = -1, -2
"""Returned instead of a token: some logit of the row is not finite; every token of the row is banned."""

_WEIGHT_OF_LIKELIEST = 2.0**42
"""The weight of the most likely token. The weights of 2^20 tokens fit into an int64 with room to spare."""

_FURTHEST = 29.0
"""A token further below the most likely one is impossible, in natural logarithms. At this distance the weight is just
above 1."""


def finite(logits: torch.Tensor) -> torch.Tensor:
    """Whether all logits of a row are finite: fp32 [R, vocab] to bool [R]."""
    if runs_triton(logits):
        from kvloom.ops.gpu.sampling import finite as fused

        return fused(logits)
    # Two reductions that propagate NaN are 20 times cheaper than isfinite().all()
    return logits.amax(-1).isfinite() & logits.amin(-1).isfinite()


def greedy(scores: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row, the first one if there are several: fp32 [R, vocab] to int64 [R]."""
    if runs_triton(scores):
        from kvloom.ops.gpu.sampling import greedy as fused

        return fused(scores)
    if scores.is_cpu:
        # numpy's argmax is vectorized and 10 times as fast as torch's
        return torch.from_numpy(scores.numpy().argmax(-1))
    return scores.argmax(-1)


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``greedy`` and ``finite`` together, in one pass in C++: fp32 [R, vocab] to int64 [R] and bool [R].

    The token of a row that is not finite is meaningless.
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
    """Sample one token per row by inverting the cumulative distribution at ``uniform``.

    The filters apply in this order:

    1. temperature;
    2. min-p (Nguyen et al., 2024) keeps tokens that are at least ``min_p`` times as likely as the most likely one;
    3. top-k;
    4. top-p (nucleus sampling, Holtzman et al., 2019) keeps the fewest tokens that reach ``top_p`` of the probability
       that the other filters have left.

    Equally likely tokens are ranked by id, smaller ids first. The distribution is inverted by rank if top-k or top-p is
    on, and by id otherwise.

    C++ and torch compute the same numbers, bit for bit. A token's distance from the most likely one is
    ``(largest - score) / temperature`` in fp32. Tokens are ranked by distance. A token is impossible if its distance
    exceeds ``-log(min_p)`` or ``_FURTHEST``. Its weight is ``exp(-distance)`` in fp32 times 2^42, truncated to an
    integer, so that sums are exact in any order. The nucleus needs ``top_p`` times the weight left by the other
    filters. The sampled token is the one at which the cumulative weight exceeds ``uniform`` times the weight left by
    all filters. Both products are in fp64.

    Args:
        scores: fp32 [R, vocab], with a vocabulary of less than 2^20. They must not be NaN or +inf. -inf is sampled only
            if a row has nothing else.
        temperature: fp32 [R], above 0.
        min_p: fp32 [R]; 0 for off.
        top_k: int64 [R], at least 1; the vocabulary's size for off.
        top_p: fp32 [R]; 1 for off.
        uniform: fp64 [R] in [0, 1).

    Returns:
        int64 [R].
    """
    if runs_triton(scores):
        from kvloom.ops.gpu.sampling import sample as fused

        return fused(scores, temperature, min_p, top_k, top_p, uniform)
    rows, vocab = scores.shape
    assert vocab < 2**20
    furthest = (-min_p.log()).clamp(max=_FURTHEST)
    lib = library(scores)
    if lib is not None and scores.dtype is torch.float32 and scores.stride(1) == 1:
        chosen = torch.empty(rows, dtype=torch.int64)
        columns = [column.contiguous() for column in (temperature, furthest, top_k, top_p, uniform)]
        pointers = (column.data_ptr() for column in columns)
        lib.kvloom_sample(scores.data_ptr(), rows, vocab, scores.stride(0), *pointers, chosen.data_ptr())
        return chosen
    # The clamp avoids NaN in rows that have nothing but -inf
    peak = scores.amax(-1, keepdim=True).clamp(min=torch.finfo(torch.float32).min)
    below = (peak - scores) / temperature.clamp(min=torch.finfo(torch.float32).tiny)[:, None]
    below.masked_fill_(below > furthest[:, None], torch.inf)
    chosen = torch.empty(rows, dtype=torch.int64, device=scores.device)
    ranked = (top_k < vocab) | (top_p < 1)
    if not ranked.all():
        plain = ~ranked
        chosen[plain] = _sample_all(_rows(below, plain), uniform[plain])
    if ranked.any():
        chosen[ranked] = _sample_ranked(_rows(below, ranked), top_k[ranked], top_p[ranked], uniform[ranked])
    return chosen


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    min_p: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
    edits: Edits | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Choose the next token of each row, greedy or sampled. On a GPU the host does not wait.

    Args:
        logits: fp32 [R, vocab], contiguous. They are edited in place and restored.
        temperature: see ``sample``. A row with less than fp32's smallest normal number is greedy.
        min_p: see ``sample``.
        top_k: see ``sample``.
        top_p: see ``sample``.
        uniform: see ``sample``.
        edits: applied before a token is chosen.

    Returns:
        Tokens, int64 [R], or ``NOT_FINITE`` or ``STUCK`` instead; and the tokens' log probabilities under the logits
        before edits, fp32 [R], undefined for rows without a token.
    """
    if runs_triton(logits):
        from kvloom.ops.gpu.sampling import sample_tokens as fused

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


def _sample_all(below: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Sample from all tokens by id, given their distances ``below``. For ``uniform`` see ``sample``."""
    cumulative = _weights(below).cumsum(-1)
    return _passed(cumulative, _drawn(uniform, cumulative[:, -1]))


def _sample_ranked(
    below: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Sample by rank, given the distances ``below`` of all tokens. For the other arguments see ``sample``."""
    vocab = below.shape[1]
    whole = _weights(below).sum(-1)
    nearest = below.topk(min(_CANDIDATES, vocab), largest=False).values
    value, rank, covered = _draw_rank(nearest, whole, vocab, top_k, top_p, uniform)
    if not covered.all():
        rest = ~covered
        nearest = _ascending(_rows(below, rest))
        value[rest], rank[rest], _ = _draw_rank(nearest, whole[rest], vocab, top_k[rest], top_p[rest], uniform[rest])
    # The token is number ``rank``, by id, of the tokens at this distance
    row, token = (below == value[:, None]).nonzero(as_tuple=True)
    return token[torch.searchsorted(row, torch.arange(len(below), device=below.device)) + rank]


def _draw_rank(
    nearest: torch.Tensor,
    whole: torch.Tensor,
    vocab: int,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Sample a rank among the most likely tokens.

    Args:
        nearest: fp32 [R, n], the distances of each row's n most likely tokens, ascending.
        whole: int64 [R], the weight of all tokens of a row.
        vocab: the number of tokens in a row.
        top_k: see ``sample``.
        top_p: see ``sample``.
        uniform: see ``sample``.

    Returns:
        The sampled token's distance, fp32 [R]; the number of tokens before it at the same distance, int64 [R]; and
        whether the n tokens were enough, bool [R].
    """
    count = nearest.shape[1]
    cumulative = _weights(nearest).cumsum(-1)
    limited = top_k < vocab
    whole = torch.where(limited, cumulative.gather(1, (top_k.clamp(max=count) - 1)[:, None])[:, 0], whole)
    nucleus = (top_p.double() * whole.double()).ceil().long().clamp(min=1)
    # The nucleus includes the token at which the sum reaches the limit, and so always the first token
    last = torch.searchsorted(cumulative, torch.where(top_p < 1, nucleus, whole)[:, None])
    covered = torch.where(limited, top_k <= count, last[:, 0] < count) if count < vocab else torch.ones_like(limited)
    kept = cumulative.gather(1, last.clamp(max=count - 1))[:, 0]
    index = _passed(cumulative, _drawn(uniform, kept))[:, None]
    value = nearest.gather(1, index)
    first = torch.searchsorted(nearest, value)
    return value[:, 0], (index - first)[:, 0], covered


def _weights(below: torch.Tensor) -> torch.Tensor:
    """The weights, int64, of tokens at distances ``below``, fp32. An infinite distance has weight 0.

    They are ``exp(-below)`` in fixed point, computed with operations that C++ repeats bit for bit: 2^n * e^r with
    abs(r) <= ln(2) / 2 and ln(2) in two parts (as Cephes' expf).
    """
    x = -below.clamp(max=87.0)
    n = x * 1.44269504088896341 + 12582912.0 - 12582912.0
    r = x - n * 0.693359375
    r = r - n * -2.12194440e-4
    p = torch.full_like(r, 1.9875691500e-4)
    for factor in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
        p = p * r + factor
    p = p * (r * r) + r + 1.0
    scale = (n.int() + 127 << 23).view(torch.float32)
    return (p * scale * _WEIGHT_OF_LIKELIEST).long()


def _drawn(uniform: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """The cumulative weight to exceed, int64 [R], from uniforms, fp64 [R], and the total weights, int64 [R]."""
    return (uniform * kept.double()).long().minimum(kept - 1)


def _passed(cumulative: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """The index [R] at which ``cumulative``, int64 [R, n], exceeds ``drawn``, int64 [R]. Its weight is never 0."""
    return torch.searchsorted(cumulative, drawn[:, None], right=True)[:, 0].clamp(max=cumulative.shape[1] - 1)


def _ascending(below: torch.Tensor) -> torch.Tensor:
    """Sort each row, the smallest first."""
    if below.is_cpu:
        # numpy sorts values only. torch also computes indices, which takes twice as long
        return torch.from_numpy(np.sort(below.numpy(), axis=-1))
    return below.sort(dim=-1).values


def _rows(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows that ``mask`` selects, without a copy if it selects all."""
    return tensor if mask.all() else tensor[mask]
