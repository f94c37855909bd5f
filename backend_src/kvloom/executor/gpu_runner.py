"""A step on a GPU: what plain sampling chooses is chosen there, the rest from the same logits."""

from collections.abc import Callable

import torch

from kvloom.decoding.sampler import choose, draw_parameters, plain
from kvloom.errors import Internal
from kvloom.executor.device import current
from kvloom.executor.gpu_step import GpuStep
from kvloom.executor.graphs import CudaRecorder
from kvloom.executor.next_step import NextStep
from kvloom.executor.runner import Runner, build_batch
from kvloom.executor.step_buffers import SamplingTensors
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Batch, Decoder
from kvloom.ops.sampling import NOT_FINITE
from kvloom.request import Sampled, Sequence, Slice


class GpuRunner(Runner):
    """Runs steps by ``GpuStep``; arguments as of ``Runner``, and the step.

    While the GPU computes, the host prepares the inputs of the step that comes if every answer goes on, and does what
    the engine has left for that time. Then it waits, once.
    """

    overlaps = True

    def __init__(self, decoder: Decoder, storage: Storage, host: Storage, block_size: int, step: GpuStep):
        super().__init__(decoder, storage, host, block_size)
        self._step = step
        self._next: NextStep | None = None

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
    def run(self, slices: list[Slice], meanwhile: Callable[[], None] | None = None) -> list[Sampled | Exception]:
        """See ``Runner``. Rows with penalties, bans, biases or log probabilities are chosen again by ``choose``.

        These rows are chosen outside of a step's graph, after the wait, by a handful of launches and a second wait:
        what is edited is as long as the answer, so that its tensors have no fixed size and a graph no place for them.
        """
        sampled = [piece.sequence for piece in slices if piece.samples]
        batch, draws = self._inputs(slices, sampled)
        self._step.launch(batch, draws)
        decodes = len(sampled) == len(slices)
        self._next = NextStep(slices, draws, self._block_size) if decodes else None
        if meanwhile is not None:
            meanwhile()
        outcomes = [_outcome(token) for token in self._step.finish()]
        others = [row for row, sequence in enumerate(sampled) if not plain(sequence)]
        if others:
            for row, outcome in zip(others, self._choose(others, sampled), strict=True):
                outcomes[row] = outcome
        return outcomes

    def _inputs(self, slices: list[Slice], sampled: list[Sequence]) -> tuple[Batch, SamplingTensors]:
        """Prepared while the last step was computed, or made now."""
        prepared = self._next.inputs(slices) if self._next is not None else None
        if prepared is not None:
            return prepared
        return build_batch(slices, self._block_size), SamplingTensors(
            *draw_parameters(sampled, self._step.logits.shape[1])
        )

    def _choose(self, rows: list[int], sampled: list[Sequence]) -> list[Sampled | Exception]:
        logits = self._step.logits
        with current(logits.device):
            return choose(logits[torch.tensor(rows, device=logits.device)], [sampled[row] for row in rows])


def _outcome(token: int) -> Sampled | Exception:
    return Internal("logits are not finite") if token == NOT_FINITE else Sampled(token)
