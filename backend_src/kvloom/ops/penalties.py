"""Changes to single scores before a token is chosen: bias, penalties, bans.

Each takes the places to change as indices into the flattened scores, ``row * vocab + token``, so that the work follows
the number of tokens concerned and not rows times vocabulary. All change ``scores`` in place. A scores matrix is fp32
[R, vocab], contiguous; sums are taken in fp64 and rounded once.
"""

import torch


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


def _store(scores: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    # an overflow must neither ban a token nor turn into NaN further on
    largest = torch.finfo(scores.dtype).max
    scores.view(-1)[index] = new.clamp(-largest, largest).to(scores.dtype)
