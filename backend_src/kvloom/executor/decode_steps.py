"""Decode steps on a CPU. Their inputs are at fixed addresses, so that they can be recorded and replayed."""

import logging
from collections.abc import Sequence
from functools import partial

import numpy as np
import torch

from kvloom.kv.blocks import blocks_for
from kvloom.kv.codec import LayerCache
from kvloom.models.decoder import Batch, Decoder
from kvloom.ops.native import library
from kvloom.ops.recording import Recorder, Recording
from kvloom.ops.sampling import argmax
from kvloom.request import Slice

log = logging.getLogger(__name__)

Result = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]
"""fp32 logits [sequences, vocab] and their ``argmax``. Both are valid until the next step."""


class DecodeInputs:
    """The inputs of decode steps, at the same addresses in every step.

    Args:
        sequences: maximum number of sequences in a step.
        context_length: longest sequence in tokens.
        block_size: tokens per block.
    """

    def __init__(self, sequences: int, context_length: int, block_size: int):
        self._context_length = context_length
        self._block_size = block_size
        self._tokens, self._positions, self._slots = self._rows = np.zeros((3, sequences), dtype=np.int64)
        self._lengths = np.zeros(sequences, dtype=np.int32)
        self._tables = np.zeros((sequences, blocks_for(context_length, block_size)), dtype=np.int32)
        self._starts = torch.arange(sequences + 1, dtype=torch.int32)
        self._all_rows = torch.arange(sequences)
        self._written: list[list[int]] = [[] for _ in range(sequences)]

    def fill(self, slices: Sequence[Slice]) -> None:
        """Write a step's inputs, one row per slice."""
        tokens, positions, slots = [], [], []
        for row, piece in enumerate(slices):
            sequence, position = piece.sequence, piece.start
            blocks = sequence.blocks
            if self._written[row] != blocks:
                self._tables[row, : len(blocks)] = blocks
                self._written[row] = blocks.copy()
            tokens.append(sequence.tokens[position])
            positions.append(position)
            slots.append(blocks[position // self._block_size] * self._block_size + position % self._block_size)
        count = len(slices)
        self._rows[:, :count] = tokens, positions, slots
        np.add(self._positions[:count], 1, out=self._lengths[:count], casting="unsafe")

    def batch(self, count: int) -> Batch:
        """Views of the first ``count`` rows."""
        return Batch(
            tokens=torch.from_numpy(self._tokens[:count]),
            positions=torch.from_numpy(self._positions[:count]),
            slots=torch.from_numpy(self._slots[:count]),
            query_starts=self._starts[: count + 1],
            seq_lens=torch.from_numpy(self._lengths[:count]),
            block_tables=torch.from_numpy(self._tables[:count]),
            logit_rows=self._all_rows[:count],
            max_queries=1,
            max_length=self._context_length,
        )


class DecodeSteps:
    """Computes decode steps. For each number of sequences the first step is recorded, and later steps replay it.

    A replay calls the same C++ functions on the same memory as the first step, so its logits are bit-identical. Other
    operations can't be replayed. If a model needs any, none of its steps is replayed.

    Args:
        decoder: the model.
        layers: each layer's keys and values in the cache.
        sequences: maximum number of sequences in a step.
        context_length: longest sequence in tokens.
        record: whether to record and replay.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: list[LayerCache],
        sequences: int,
        context_length: int,
        *,
        record: bool = True,
    ):
        self._decoder = decoder
        self._layers = layers
        self._inputs = DecodeInputs(sequences, context_length, layers[0][0].shape[2])
        self._recorder = Recorder(sequences) if record and library() is not None else None
        self._recordings: dict[int, Recording[Result]] = {}

    def take(self, slices: Sequence[Slice]) -> bool:
        """Whether a step is a decode step: every slice is just a sequence's last token."""
        return all(piece.count == 1 and piece.samples for piece in slices)

    def run(self, slices: Sequence[Slice]) -> Result:
        """Compute a decode step."""
        count = len(slices)
        self._inputs.fill(slices)
        recording = self._recordings.get(count)
        if recording is not None:
            return recording.replay()
        if self._recorder is None:
            return self._compute(count)
        recording = self._recorder.record(count, partial(self._compute, count))
        if recording.complete:
            self._recordings[count] = recording
        else:
            log.warning("decode steps can't be replayed and take longer, because they need %s", recording.others[0])
            # Recordings use the recorder's memory, so they go with it
            self._recordings.clear()
            self._recorder = None
        return recording.result

    def _compute(self, count: int) -> Result:
        logits = self._decoder.forward(self._inputs.batch(count), self._layers)
        return logits, argmax(logits)
