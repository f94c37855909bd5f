"""Log probabilities of tokens under a model's raw logits."""

import torch

from kvloom.ops.native import library


def token_logprobs(
    logits: torch.Tensor, chosen: torch.Tensor, count: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Natural log probabilities of the chosen and of the likeliest tokens.

    Args:
        logits: fp32 [R, vocab].
        chosen: int64 [R].
        count: how many of the likeliest are wanted; fewer where the vocabulary is smaller.

    Returns:
        Of the chosen, fp32 [R]; of the likeliest, fp32 [R, count], best first; the likeliest tokens, int64 [R, count].
        Of equal logits the smaller id comes first, also where only some of them are among the likeliest.
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
