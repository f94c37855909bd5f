"""From logits to token ids; every row by its own parameters and independent of the others."""

import torch


def greedy(logits: torch.Tensor) -> torch.Tensor:
    """The most likely token of each row: fp32 [R, vocab] to int64 [R]."""
    return logits.argmax(-1)


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    uniform: torch.Tensor,
) -> torch.Tensor:
    """Draw one token per row by inverting the cumulative distribution at ``uniform``.

    The order is temperature, then top-k, then top-p (nucleus sampling, Holtzman et al., 2019): top-p counts the
    probabilities that top-k left, renormalized.

    Args:
        logits: fp32 [R, vocab].
        temperature: fp32 [R], above 0.
        top_k: int64 [R]; the vocabulary's size where it is off.
        top_p: fp32 [R]; 1 where it is off.
        uniform: fp64 [R] in [0, 1).

    Returns:
        int64 [R].
    """
    # the largest score becomes 0 before the division, so that no temperature, however small, can overflow it
    scores = (logits - logits.amax(-1, keepdim=True)) / temperature[:, None]
    chosen = torch.empty(logits.shape[0], dtype=torch.int64, device=logits.device)
    filtered = (top_k < logits.shape[1]) | (top_p < 1)
    plain = ~filtered
    if plain.any():
        chosen[plain] = _invert(scores[plain].softmax(-1), uniform[plain])
    if filtered.any():
        ranked, tokens = scores[filtered].sort(dim=-1, descending=True, stable=True)
        rank = torch.arange(logits.shape[1], device=logits.device)
        ranked = ranked.masked_fill(rank >= top_k[filtered][:, None], float("-inf"))
        probability = ranked.softmax(-1)
        before = probability.cumsum(-1) - probability
        # the first token always stays, also for a top_p that rounds to nothing
        # rounding must cut nothing where top-p is off
        limit = torch.where(top_p < 1, top_p, torch.inf)[filtered]
        outside = (before >= limit[:, None]) & (rank > 0)
        index = _invert(probability.masked_fill(outside, 0), uniform[filtered])
        chosen[filtered] = tokens.gather(1, index[:, None])[:, 0]
    return chosen


def _invert(probability: torch.Tensor, uniform: torch.Tensor) -> torch.Tensor:
    """Index [R] at which the cumulative sum of ``probability`` [R, n] passes ``uniform`` [R] of its total."""
    cumulative = probability.cumsum(-1, dtype=torch.float64)
    target = uniform[:, None] * cumulative[:, -1:]
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp(max=probability.shape[1] - 1)
