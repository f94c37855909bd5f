"""Changes to single scores before a token is chosen: bias, penalties, bans.

Each takes the places to change as indices into the flattened scores, ``row * vocab + token``, so that the work follows
the number of tokens concerned and not rows times vocabulary. All change ``scores`` in place. A scores matrix is fp32
[R, vocab], contiguous; sums are taken in fp64 and rounded once.
"""

import torch

from kvloom.ops.gpu import runs_triton


def add_bias(scores: torch.Tensor, index: torch.Tensor, bias: torch.Tensor) -> None:
    """Add ``bias`` fp64 [N] at ``index`` int64 [N], in which no place comes twice."""
    _store(scores, index, scores.view(-1)[index].double() + bias)


def penalize_repetition(scores: torch.Tensor, index: torch.Tensor, penalty: torch.Tensor) -> None:
    """Divide positive scores and multiply others by ``penalty`` (CTRL, Keskar et al., 2019, as transformers does).

    Args:
        scores: fp32 [R, vocab].
        index: int64 [N]; a place that comes several times is changed once.
        penalty: fp64 [N], above 0, the same wherever a place is the same.
    """
    old = scores.view(-1)[index].double()
    _store(scores, index, torch.where(old > 0, old / penalty, old * penalty))


def penalize_counts(
    scores: torch.Tensor, index: torch.Tensor, counts: torch.Tensor, presence: torch.Tensor, frequency: torch.Tensor
) -> None:
    """Subtract ``presence + counts * frequency``, as OpenAI's API defines them.

    Args:
        scores: fp32 [R, vocab].
        index: int64 [N], in which no place comes twice.
        counts: int64 [N], how often the token came, at least once.
        presence: fp64 [N].
        frequency: fp64 [N].
    """
    _store(scores, index, scores.view(-1)[index].double() - (presence + counts * frequency))


def ban(scores: torch.Tensor, index: torch.Tensor) -> None:
    """Make the tokens at ``index`` int64 [N] impossible."""
    scores.view(-1)[index] = -torch.inf


def edit(
    scores: torch.Tensor,
    index: torch.Tensor,
    bias: torch.Tensor,
    repetition: torch.Tensor,
    subtracted: torch.Tensor,
    banned: torch.Tensor,
) -> torch.Tensor:
    """All of the above at once and in this order, in tensors whose size need not follow what is in them.

    Args:
        scores: fp32 [R, vocab].
        index: int64 [N], in which no place comes twice; -1 stands for none.
        bias: fp64 [N]; 0 where there is none.
        repetition: fp64 [N], the repetition penalty; 1 where there is none.
        subtracted: fp64 [N], ``presence + counts * frequency``; 0 where there is none.
        banned: bool [N].

    Returns:
        The scores as they were, fp32 [N], for ``restore``; undefined where ``index`` is -1.
    """
    if runs_triton(scores):
        from kvloom.ops.gpu.penalties import edit as fused

        return fused(scores, index, bias, repetition, subtracted, banned)
    saved = scores.view(-1)[index.clamp(min=0)]
    used = index >= 0
    places = index[used]
    add_bias(scores, places, bias[used])
    penalize_repetition(scores, places, repetition[used])
    _store(scores, places, scores.view(-1)[places].double() - subtracted[used])
    ban(scores, places[banned[used]])
    return saved


def restore(scores: torch.Tensor, index: torch.Tensor, saved: torch.Tensor) -> None:
    """Undo ``edit``, given its ``index`` and what it returned."""
    if runs_triton(scores):
        from kvloom.ops.gpu.penalties import restore as fused

        return fused(scores, index, saved)
    used = index >= 0
    scores.view(-1)[index[used]] = saved[used]
    return None


def _store(scores: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    # an overflow must neither ban a token nor turn into NaN further on
    largest = torch.finfo(scores.dtype).max
    scores.view(-1)[index] = new.clamp(-largest, largest).to(scores.dtype)
