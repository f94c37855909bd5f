"""Log probabilities of tokens under a model's raw logits."""

import torch

from kvloom.ops.native import library


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log probabilities of the chosen tokens and of the most likely tokens.

    Args:
        logits: fp32 [R, vocab].
        chosen: int64 [R].
        count: how many of the most likely tokens to return. At most the whole vocabulary is returned.

    Returns:
        The log probabilities of the chosen tokens, fp32 [R]; those of the most likely tokens, fp32 [R, count], best
        first; and these tokens, int64 [R, count]. Of equal logits, tokens with smaller ids come first.
    """
    rows, vocab = logits.shape
    count = min(count, vocab)
    lib = library(logits)
    if lib is not None and logits.dtype is torch.float32 and logits.is_contiguous():
        own, values = torch.empty(rows), torch.empty(rows, count)
        ids = torch.empty(rows, count, dtype=torch.int64)
        chosen = chosen.contiguous()
        outputs = (own.data_ptr(), values.data_ptr(), ids.data_ptr())
        lib.kvloom_logprobs(logits.data_ptr(), rows, vocab, chosen.data_ptr(), count, *outputs)
        return own, values, ids
    logprobs = logits.log_softmax(-1)
    own = logprobs.gather(1, chosen[:, None])[:, 0]
    if not count:
        return own, logprobs[:, :0], chosen.new_empty(rows, 0)
    least = logits.topk(count).values[:, -1:]
    above, equal = logits > least, logits == least
    wanted = above | (equal & (equal.cumsum(-1) <= count - above.sum(-1, keepdim=True)))
    ids = wanted.nonzero()[:, 1].view(rows, count)
    order = logits.gather(1, ids).sort(dim=-1, descending=True, stable=True).indices
    ids = ids.gather(1, order)
    return own, logprobs.gather(1, ids), ids
