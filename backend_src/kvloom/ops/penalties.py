"""Changes to single scores before a token is chosen: bias, penalties, bans.

Each takes the places to change as indices into the flattened scores, ``row * vocab + token``, so that the work follows
the number of tokens concerned and not rows times vocabulary. All change ``scores`` in place. A scores matrix is fp32
[R, vocab], contiguous; sums are taken in fp64 and rounded once.
"""

from dataclasses import dataclass

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import library


@dataclass(frozen=True, slots=True)
class Edits:
    """All kinds of changes to N places, in tensors whose size need not follow what is in them; made in this order.

    Attributes:
        index: int64 [N], in which no place comes twice; -1 stands for none.
        bias: fp64 [N]; 0 where there is none.
        repetition: fp64 [N], the repetition penalty; 1 where there is none.
        subtracted: fp64 [N], ``presence + counts * frequency``; 0 where there is none.
        banned: bool [N].
    """

    index: torch.Tensor
    bias: torch.Tensor
    repetition: torch.Tensor
    subtracted: torch.Tensor
    banned: torch.Tensor

    def to(self, device: torch.device) -> "Edits":
        """The same on a device."""
        tensors = (self.index, self.bias, self.repetition, self.subtracted, self.banned)
        return Edits(*(tensor.to(device) for tensor in tensors))


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


def ban(scores: torch.Tensor, index: torch.Tensor) -> None:
    """Make the tokens at ``index`` int64 [N] impossible."""
    scores.view(-1)[index] = -torch.inf


def edit(scores: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Make ``edits`` in scores fp32 [R, vocab]; returns what was there before, fp32 [N], for ``restore``."""
    if runs_triton(scores):
        from kvloom.ops.gpu.penalties import edit as fused

        return fused(scores, edits)
    lib = library(scores)
    if lib is not None and scores.dtype is torch.float32:
        assert scores.is_contiguous()
        saved = torch.empty(len(edits.index), dtype=torch.float32)
        columns = (edits.index, edits.bias, edits.repetition, edits.subtracted, edits.banned)
        lib.kvloom_edit(scores.data_ptr(), *(column.data_ptr() for column in columns), len(saved), saved.data_ptr())
        return saved
    saved = scores.view(-1)[edits.index.clamp(min=0)]
    used = edits.index >= 0
    places = edits.index[used]
    add_bias(scores, places, edits.bias[used])
    penalize_repetition(scores, places, edits.repetition[used])
    _store(scores, places, scores.view(-1)[places].double() - edits.subtracted[used])
    ban(scores, places[edits.banned[used]])
    return saved


def restore(scores: torch.Tensor, edits: Edits, saved: torch.Tensor) -> None:
    """Undo ``edit``, given what it returned."""
    if runs_triton(scores):
        from kvloom.ops.gpu.penalties import restore as fused

        fused(scores, edits, saved)
        return
    lib = library(scores)
    if lib is not None and scores.dtype is torch.float32:
        lib.kvloom_restore(scores.data_ptr(), edits.index.data_ptr(), saved.data_ptr(), len(saved))
        return
    used = edits.index >= 0
    scores.view(-1)[edits.index[used]] = saved[used]


def _store(scores: torch.Tensor, index: torch.Tensor, new: torch.Tensor) -> None:
    # an overflow must neither ban a token nor turn into NaN further on
    largest = torch.finfo(scores.dtype).max
    scores.view(-1)[index] = new.clamp(-largest, largest).to(scores.dtype)
