"""A step on a GPU: what plain sampling chooses is chosen there, the rest from the same logits."""

import torch

from kvloom.device import current
from kvloom.errors import Internal
from kvloom.gpu_step import GpuStep
from kvloom.graphs import CudaRecorder
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Decoder
from kvloom.ops.sampling import NOT_FINITE
from kvloom.request import Sampled, Sequence, Slice
from kvloom.runner import Runner, build_batch
from kvloom.sampler import choose, draw_parameters, plain
from kvloom.step_buffers import Draws


class GpuRunner(Runner):
    """Runs steps by ``GpuStep``; arguments as of ``Runner``, and the step."""

    def __init__(self, decoder: Decoder, storage: Storage, host: Storage, block_size: int, step: GpuStep):
        super().__init__(decoder, storage, host, block_size)
        self._step = step

    @classmethod
    def recorded(
        cls,
        decoder: Decoder,
        storage: Storage,
        host: Storage,
        block_size: int,
        tokens: int,
        sequences: int,
        context_length: int,
    ) -> "GpuRunner":
        """A runner whose decode steps are CUDA graphs; the last three arguments are as of ``GpuStep``."""
        step = GpuStep(decoder, storage.layers, tokens, sequences, context_length, storage.memory.device)
        step.record_graphs(CudaRecorder())
        return cls(decoder, storage, host, block_size, step)

    @torch.inference_mode()
    def run(self, slices: list[Slice]) -> list[Sampled | Exception]:
        """See ``Runner``. Rows with penalties, bans, biases or log probabilities are chosen again by ``choose``."""
        sampled = [piece.sequence for piece in slices if piece.samples]
        draws = Draws(*draw_parameters(sampled, self._step.logits.shape[1]))
        tokens = self._step.run(build_batch(slices, self._block_size), draws)
        outcomes = [_outcome(token) for token in tokens]
        others = [row for row, sequence in enumerate(sampled) if not plain(sequence)]
        if others:
            for row, outcome in zip(others, self._choose(others, sampled), strict=True):
                outcomes[row] = outcome
        return outcomes

    def _choose(self, rows: list[int], sampled: list[Sequence]) -> list[Sampled | Exception]:
        logits = self._step.logits
        with current(logits.device):
            return choose(logits[torch.tensor(rows, device=logits.device)], [sampled[row] for row in rows])


def _outcome(token: int) -> Sampled | Exception:
    return Internal("logits are not finite") if token == NOT_FINITE else Sampled(token)
