"""Runs steps on a CPU: turns slices of sequences into a batch and samples each sequence's next token."""

from collections.abc import Callable

import numpy as np
import torch

from kvloom.decoding.sampler import choose
from kvloom.executor.decode_steps import DecodeSteps
from kvloom.kv.storage import Storage
from kvloom.kv.transfer import copy_blocks
from kvloom.models.decoder import Batch, Decoder
from kvloom.request import Sampled, Slice, StepPlan


class Runner:
    """Runs steps on a CPU with the model, the cache and the sampler.

    Args:
        decoder: the model.
        storage: the memory of the device's blocks.
        host: the memory of swapped blocks.
        block_size: tokens per block.
        decodes: computes decode steps; None to compute them like all others.

    Attributes:
        overlaps: whether the host is free while a step is computed. Then ``run`` takes ``meanwhile``.
    """

    overlaps = False

    def __init__(
        self, decoder: Decoder, storage: Storage, host: Storage, block_size: int, decodes: DecodeSteps | None = None
    ):
        self._decoder = decoder
        self._storage = storage
        self._host = host
        self._block_size = block_size
        self._decodes = decodes

    def move(self, plan: StepPlan) -> None:
        """Copy the blocks that a step swaps out, then those that it swaps in."""
        copy_blocks(self._storage, self._host, plan.swap_out)
        copy_blocks(self._host, self._storage, plan.swap_in)

    @torch.inference_mode()
    def run(self, slices: list[Slice], meanwhile: Callable[[], None] | None = None) -> list[Sampled | Exception]:
        """Compute the slices. Return a sampled token, in order, for each slice that ends at its last known token.

        An exception in place of a token affects that slice's sequence only.

        Args:
            slices: the tokens to compute.
            meanwhile: called while the step is computed. It must be None unless ``overlaps``.
        """
        assert meanwhile is None, "this thread computes the step itself and can't call meanwhile"
        if self._decodes is not None and self._decodes.take(slices):
            logits, best = self._decodes.run(slices)
            return choose(logits, [piece.sequence for piece in slices], best)
        logits = self._decoder.forward(build_batch(slices, self._block_size), self._storage.layers)
        return choose(logits, [piece.sequence for piece in slices if piece.samples])


def build_batch(slices: list[Slice], block_size: int) -> Batch:
    """Flatten slices into a batch. Each sequence's block table must cover its slice."""
    counts = np.array([piece.count for piece in slices])
    starts = np.zeros(len(slices) + 1, dtype=np.int32)
    np.cumsum(counts, out=starts[1:])
    ends = np.array([piece.start + piece.count for piece in slices], dtype=np.int32)
    tables = np.zeros((len(slices), max(len(piece.sequence.blocks) for piece in slices)), dtype=np.int32)
    for row, piece in enumerate(slices):
        tables[row, : len(piece.sequence.blocks)] = piece.sequence.blocks
    tokens = np.concatenate([piece.sequence.tokens[piece.start : piece.start + piece.count] for piece in slices])
    row_of = np.repeat(np.arange(len(slices)), counts)
    positions = np.arange(starts[-1]) - np.repeat(starts[:-1], counts) + np.repeat(ends - counts, counts)
    slots = tables[row_of, positions // block_size].astype(np.int64) * block_size + positions % block_size
    return Batch(
        tokens=torch.from_numpy(tokens.astype(np.int64)),
        positions=torch.from_numpy(positions),
        slots=torch.from_numpy(slots),
        query_starts=torch.from_numpy(starts),
        seq_lens=torch.from_numpy(ends),
        block_tables=torch.from_numpy(tables),
        logit_rows=torch.from_numpy(starts[1:][[piece.samples for piece in slices]].astype(np.int64) - 1),
        max_queries=int(counts.max()),
        max_length=int(ends.max()),
    )
