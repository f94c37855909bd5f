"""Runs steps on a GPU. Plain sampling is part of the step; other rows are sampled afterwards from its logits."""

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
    """Runs steps with ``GpuStep``. For the arguments see ``Runner``; ``step`` is the GPU's step.

    While the GPU computes, the host prepares the inputs of the next step as if every answer continued, and calls
    ``meanwhile``. Then it waits once.
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
        """Make a runner that records decode steps as CUDA graphs. For the last three arguments see ``GpuStep``."""
        step = GpuStep(decoder, storage.layers, tokens, sequences, context_length, storage.memory.device)
        step.record_graphs(CudaRecorder())
        return cls(decoder, storage, host, block_size, step)

    @torch.inference_mode()
    def run(self, slices: list[Slice], meanwhile: Callable[[], None] | None = None) -> list[Sampled | Exception]:
        """See ``Runner``. Rows with penalties, bans, biases or log probabilities are sampled again by ``choose``.

        That happens after the wait, outside of the step's graph, and takes a few launches and a second wait. A graph
        needs tensors of a fixed size, but the edits of a row grow with its answer.
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
        """The inputs of a step, prepared during the last step if they fit, or built now."""
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
