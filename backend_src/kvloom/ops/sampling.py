"""From scores to token ids; every row by its own parameters and independent of the others.

No step mixes rows: what a row gets is the same, bit for bit, in whatever batch it comes, whatever computes it on a CPU.
"""

import numpy as np
import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import empty, library
from kvloom.ops.penalties import Edits, edit

_CANDIDATES = 256
"""Tokens that top-k and top-p look at first. They are nearly always enough and much cheaper than sorting them all."""


NOT_FINITE, STUCK = -1, -2
"""In a token's place: the row's logits are not all finite; none of its tokens is possible."""

_WEIGHT_OF_LIKELIEST = 2.0**42
"""The weights of 2^20 tokens fit into an int64 with room to spare."""

_FURTHEST = 29.0
"""How far below the likeliest a token is still possible, in natural logarithms: its weight is then just above 1."""


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


def argmax(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
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
    left, renormalized: the fewest tokens that reach ``top_p``. Of equally likely tokens those with smaller ids count as
    likelier. The distribution is inverted by rank where top-k or top-p are on, else by id.

    In numbers, which C++ and torch follow bit for bit: a token lies ``(largest - score) / temperature`` below the
    likeliest, in fp32, by which it is ranked; what lies further than ``-log(min_p)`` or ``_FURTHEST`` is impossible.
    Its weight is ``exp`` of minus that, in fp32, times 2^42, cut to an integer; sums of integers are exact in any
    order. The nucleus' least weight is ``top_p`` of the weight before, and the weight to pass ``uniform`` of the weight
    that is left: products in fp64.

    Args:
        scores: fp32 [R, vocab], less than 2^20 of a row; not NaN, not +inf; -inf is never drawn unless a row has
            nothing else.
        temperature: fp32 [R], above 0.
        min_p: fp32 [R]; 0 where it is off.
        top_k: int64 [R], at least 1; the vocabulary's size where it is off.
        top_p: fp32 [R]; 1 where it is off.
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
    # the clamp keeps NaN out of rows that have nothing but -inf
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
    """Draw from all tokens by id, given how far they lie below the likeliest; the rest as of ``sample``."""
    cumulative = _weights(below).cumsum(-1)
    return _passed(cumulative, _drawn(uniform, cumulative[:, -1]))


def _sample_ranked(
    below: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, uniform: torch.Tensor
) -> torch.Tensor:
    """Draw from the likeliest tokens by rank, given how far all lie below the likeliest; the rest as of ``sample``."""
    vocab = below.shape[1]
    whole = _weights(below).sum(-1)
    nearest = below.topk(min(_CANDIDATES, vocab), largest=False).values
    value, rank, covered = _draw_rank(nearest, whole, vocab, top_k, top_p, uniform)
    if not covered.all():
        rest = ~covered
        nearest = _ascending(_rows(below, rest))
        value[rest], rank[rest], _ = _draw_rank(nearest, whole[rest], vocab, top_k[rest], top_p[rest], uniform[rest])
    # the token is the rank-th of those with this value, by id
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
    """Draw a place in a ranking.

    Args:
        nearest: fp32 [R, n], how far a row's n likeliest tokens lie below the likeliest, ascending.
        whole: int64 [R], the weight of all of a row's tokens.
        vocab: how many tokens a row has.
        top_k: as ``sample``, and so are the following.
        top_p: see there.
        uniform: see there.

    Returns:
        The distance drawn, fp32 [R]; the number of equal ones before it, int64 [R]; and whether the n tokens were
        enough to tell, bool [R].
    """
    count = nearest.shape[1]
    cumulative = _weights(nearest).cumsum(-1)
    limited = top_k < vocab
    whole = torch.where(limited, cumulative.gather(1, (top_k.clamp(max=count) - 1)[:, None])[:, 0], whole)
    nucleus = (top_p.double() * whole.double()).ceil().long().clamp(min=1)
    # the token that takes the sum to the limit still belongs to the nucleus, and so the first always does
    last = torch.searchsorted(cumulative, torch.where(top_p < 1, nucleus, whole)[:, None])
    covered = torch.where(limited, top_k <= count, last[:, 0] < count) if count < vocab else torch.ones_like(limited)
    kept = cumulative.gather(1, last.clamp(max=count - 1))[:, 0]
    index = _passed(cumulative, _drawn(uniform, kept))[:, None]
    value = nearest.gather(1, index)
    first = torch.searchsorted(nearest, value)
    return value[:, 0], (index - first)[:, 0], covered


def _weights(below: torch.Tensor) -> torch.Tensor:
    """Weights int64 of tokens that lie so far, fp32, below the likeliest; that of an infinite distance is 0.

    ``exp(-below)`` in fixed point, by operations that C++ can do bit for bit: 2^n * e^r with abs(r) <= ln(2) / 2, ln(2)
    in two parts (Cephes' expf).
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
    """The weight int64 [R] to pass, given uniforms fp64 [R] and the weights int64 [R] of what is drawn from."""
    return (uniform * kept.double()).long().minimum(kept - 1)


def _passed(cumulative: torch.Tensor, drawn: torch.Tensor) -> torch.Tensor:
    """Index [R] at which ``cumulative`` int64 [R, n] passes ``drawn`` int64 [R]; never that of a weight of 0."""
    return torch.searchsorted(cumulative, drawn[:, None], right=True)[:, 0].clamp(max=cumulative.shape[1] - 1)


def _ascending(below: torch.Tensor) -> torch.Tensor:
    """Each row sorted, the smallest first."""
    if below.is_cpu:
        # numpy sorts values alone, torch always finds their places too: half as fast
        return torch.from_numpy(np.sort(below.numpy(), axis=-1))
    return below.sort(dim=-1).values


def _rows(tensor: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The rows that ``mask`` selects; no copy where that is all."""
    return tensor if mask.all() else tensor[mask]
