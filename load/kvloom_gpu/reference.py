"""A simple reference for the kernels in float64, independent of the ops."""

import torch


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """RMS normalization of rows."""
    x = x.double()
    return x * (x.pow(2).mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def silu_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up."""
    gate, up = gate_up.double().chunk(2, -1)
    return gate * gate.sigmoid() * up


def rotate(x: torch.Tensor, cos_sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of heads [T, heads, head_dim] by their tokens' rows [T, head_dim] of the table."""
    first, second = x.double().chunk(2, -1)
    cos, sin = cos_sin.double()[:, None].chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), -1)


def attention(
    q: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Attention of one sequence's last queries.

    Args:
        q: [n, heads, head_dim].
        keys: [length, kv_heads, head_dim], the queries' own included.
        values: like ``keys``.
        scale: factor on the scores.

    Returns:
        float64 [n, heads, head_dim].
    """
    count, length, group = len(q), len(keys), q.shape[1] // keys.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (keys, values))
    scores = torch.einsum("nhd,lhd->hnl", q.double(), keys) * scale
    i = torch.arange(length - count, length, device=q.device)[:, None]
    j = torch.arange(length, device=q.device)[None, :]
    return torch.einsum("hnl,lhd->nhd", scores.masked_fill(j > i, -torch.inf).softmax(-1), values)


def draw(
    scores: torch.Tensor, temperature: float, min_p: float, top_k: int, top_p: float, uniform: float
) -> tuple[int, bool]:
    """The token of one row of scores, and whether rounding could change it."""
    vocab = len(scores)
    if temperature == 0:
        best = scores.double().topk(2).values
        return int(scores.argmax()), bool(best[0] == best[1])
    weights = ((scores.double() - scores.double().max()) / temperature).exp()
    near = bool(((weights / max(min_p, 1e-300) - 1).abs() < 1e-5).any()) if min_p else False
    weights[weights < min_p] = 0
    order = torch.arange(vocab, device=scores.device)
    if top_k < vocab or top_p < 1:
        order = weights.sort(descending=True, stable=True).indices[:top_k]
    cumulative = weights[order].cumsum(0)
    if top_p < 1:
        share = cumulative / cumulative[-1]
        near |= bool(((share - top_p).abs() < 1e-5).any())
        cumulative = cumulative[: int((share < top_p).sum()) + 1]
    share = cumulative / cumulative[-1]
    near |= bool(((share - uniform).abs() < 1e-5).any())
    return int(order[int(torch.searchsorted(share, uniform, right=True))]), near
