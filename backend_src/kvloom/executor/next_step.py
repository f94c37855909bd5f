"""Prepares the next step's inputs while the GPU computes the current step, as if every answer continued."""

import numpy as np
import torch

from kvloom.decoding.sampler import uniforms
from kvloom.executor.step_buffers import SamplingTensors
from kvloom.models.decoder import Batch
from kvloom.request import Sequence, Slice


class NextStep:
    """A guess of the next step: a decode of the same sequences in the same order. Its tokens are not known yet.

    ``inputs`` checks the guess against the next plan, because answers may have ended or begun and blocks may have
    changed. A wrong guess only wastes time in which the host would wait anyway.

    Args:
        slices: the current step. All of its slices sample.
        draws: how its tokens are sampled.
        block_size: tokens per block.
    """

    def __init__(self, slices: list[Slice], draws: SamplingTensors, block_size: int):
        self._sequences = [piece.sequence for piece in slices]
        self._starts = [piece.start + piece.count for piece in slices]
        self._tables = [list(sequence.blocks) for sequence in self._sequences]
        self._block_size = block_size
        rows, positions = np.arange(len(slices)), np.array(self._starts)
        # One extra column, in case a sequence gets another block
        self._host_tables = np.zeros((len(slices), max(map(len, self._tables)) + 1), dtype=np.int32)
        for row, table in enumerate(self._tables):
            self._host_tables[row, : len(table)] = table
        blocks = self._host_tables[rows, positions // block_size].astype(np.int64)
        self._slots = blocks * block_size + positions % block_size
        self._positions = positions
        self._query_starts = torch.arange(len(slices) + 1, dtype=torch.int32)
        seeds = np.array([sequence.seed for sequence in self._sequences], dtype=np.uint64)
        # The position of the token that the next step samples, one after the token of the current step
        uniform = torch.from_numpy(uniforms(seeds, (positions + 1).astype(np.uint64)))
        self._draws = SamplingTensors(draws.temperature, draws.min_p, draws.top_k, draws.top_p, uniform)

    def inputs(self, slices: list[Slice]) -> tuple[Batch, SamplingTensors] | None:
        """The same as ``build_batch`` and ``draw_parameters`` for these slices; None if the guess was wrong."""
        if [piece.sequence for piece in slices] != self._sequences:
            return None
        if [(piece.start, piece.count) for piece in slices] != [(start, 1) for start in self._starts]:
            return None
        if not all(piece.samples for piece in slices):
            return None
        for row, (sequence, table) in enumerate(zip(self._sequences, self._tables, strict=True)):
            if sequence.blocks != table and not self._take_blocks(row, sequence):
                return None
        tokens = [sequence.tokens[start] for sequence, start in zip(self._sequences, self._starts, strict=True)]
        width = max(len(sequence.blocks) for sequence in self._sequences)
        batch = Batch(
            tokens=torch.tensor(tokens, dtype=torch.int64),
            positions=torch.from_numpy(self._positions),
            slots=torch.from_numpy(self._slots),
            query_starts=self._query_starts,
            seq_lens=torch.from_numpy((self._positions + 1).astype(np.int32)),
            block_tables=torch.from_numpy(self._host_tables[:, :width]),
            logit_rows=self._query_starts[:-1].long(),
            max_queries=1,
            max_length=int(self._positions.max()) + 1,
        )
        return batch, self._draws

    def _take_blocks(self, row: int, sequence: Sequence) -> bool:
        """Update a sequence's row with its current blocks. Returns False if the row is too short."""
        table = self._host_tables[row]
        if len(sequence.blocks) > len(table):
            return False
        self._tables[row] = list(sequence.blocks)
        table[: len(sequence.blocks)] = sequence.blocks
        table[len(sequence.blocks) :] = 0
        index, offset = divmod(self._starts[row], self._block_size)
        self._slots[row] = sequence.blocks[index] * self._block_size + offset
        return True
