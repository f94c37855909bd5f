"""Log probabilities of tokens under a model's raw logits."""

import torch


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log probabilities of the chosen and of the likeliest tokens.

    Args:
        logits: fp32 [R, vocab].
        chosen: int64 [R].
        count: how many of the likeliest are wanted; fewer where the vocabulary is smaller.

    Returns:
        Of the chosen, fp32 [R]; of the likeliest, fp32 [R, count], best first; the likeliest tokens, int64 [R, count],
        of equals the smaller id first.
    """
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    ids = logprobs.topk(min(count, logits.shape[1])).indices.sort(-1).values
    values, order = logprobs.gather(1, ids).sort(dim=-1, descending=True, stable=True)
    return own, values, ids.gather(1, order)
