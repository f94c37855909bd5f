"""Edits single scores before a token is chosen: bias, penalties and bans.

Edits have indices into the flattened scores, ``row * vocab + token``, so that the work depends on the number of edits
and not on rows times vocabulary. ``scores``, fp32 [R, vocab] and contiguous, are edited in place. Each kind of edit is
computed in fp64 and rounded once.
"""

from dataclasses import dataclass

import torch

from kvloom.ops.gpu import runs_triton
from kvloom.ops.native import library


@dataclass(frozen=True, slots=True)
class Edits:
    """The edits of N scores, applied in the order of the attributes. Unused entries allow tensors of a fixed size.

    Attributes:
        index: int64 [N], without duplicates; -1 for an unused entry.
        bias: fp64 [N]; 0 for none.
        repetition: fp64 [N], the repetition penalty; 1 for none.
        subtracted: fp64 [N], ``presence + counts * frequency``; 0 for none.
        banned: bool [N].
    """

    index: torch.Tensor
    bias: torch.Tensor
    repetition: torch.Tensor
    subtracted: torch.Tensor
    banned: torch.Tensor

    def to(self, device: torch.device) -> "Edits":
        """Copy the edits to a device."""
        tensors = (self.index, self.bias, self.repetition, self.subtracted, self.banned)
        return Edits(*(tensor.to(device) for tensor in tensors))


def edit(scores: torch.Tensor, edits: Edits) -> torch.Tensor:
    """Apply ``edits`` to scores, fp32 [R, vocab]. Returns the old scores, fp32 [N], for ``restore``."""
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
    flat, repetition = scores.view(-1), edits.repetition[used]
    changed = _rounded(flat[places].double() + edits.bias[used])
    # The penalty of CTRL (Keskar et al., 2019), as in transformers
    changed = _rounded(torch.where(changed > 0, changed / repetition, changed * repetition))
    changed = _rounded(changed - edits.subtracted[used])
    flat[places] = changed.masked_fill(edits.banned[used], -torch.inf).float()
    return saved


def restore(scores: torch.Tensor, edits: Edits, saved: torch.Tensor) -> None:
    """Undo ``edit``, given its result."""
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


def _rounded(changed: torch.Tensor) -> torch.Tensor:
    """Round fp64 to fp32. It saturates, because infinity would ban a token or become NaN later."""
    largest = torch.finfo(torch.float32).max
    return changed.clamp(-largest, largest).float().double()
