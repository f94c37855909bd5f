"""The next step's inputs, prepared while a GPU computes this one, as if every answer went on."""

import numpy as np
import torch

from kvloom.decoding.sampler import uniforms
from kvloom.executor.step_buffers import SamplingTensors
from kvloom.models.decoder import Batch
from kvloom.request import Sequence, Slice


class NextStep:
    """A decode of the same sequences in the same order, but for the tokens, which are not known yet.

    Whether that is what comes is looked at when it does: an answer may have ended, another one begun, blocks may have
    changed. So a guess costs time in which the host would wait, and never a wrong step.

    Args:
        slices: the step that is being computed; all of them sample.
        draws: how its tokens are drawn.
        block_size: tokens per block.
    """

    def __init__(self, slices: list[Slice], draws: SamplingTensors, block_size: int):
        self._sequences = [piece.sequence for piece in slices]
        self._starts = [piece.start + piece.count for piece in slices]
        self._tables = [list(sequence.blocks) for sequence in self._sequences]
        self._block_size = block_size
        rows, positions = np.arange(len(slices)), np.array(self._starts)
        # a column to spare, for the block that a sequence may get
        self._host_tables = np.zeros((len(slices), max(map(len, self._tables)) + 1), dtype=np.int32)
        for row, table in enumerate(self._tables):
            self._host_tables[row, : len(table)] = table
        blocks = self._host_tables[rows, positions // block_size].astype(np.int64)
        self._slots = blocks * block_size + positions % block_size
        self._positions = positions
        self._query_starts = torch.arange(len(slices) + 1, dtype=torch.int32)
        seeds = np.array([sequence.seed for sequence in self._sequences], dtype=np.uint64)
        # the position of the token to draw: the one that this step draws comes before it
        uniform = torch.from_numpy(uniforms(seeds, (positions + 1).astype(np.uint64)))
        self._draws = SamplingTensors(draws.temperature, draws.min_p, draws.top_k, draws.top_p, uniform)

    def inputs(self, slices: list[Slice]) -> tuple[Batch, SamplingTensors] | None:
        """What ``build_batch`` and ``draw_parameters`` would give for these; None where the guess was wrong."""
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
        """Put a sequence's blocks as they are now into its row; False where it has no room."""
        table = self._host_tables[row]
        if len(sequence.blocks) > len(table):
            return False
        self._tables[row] = list(sequence.blocks)
        table[: len(sequence.blocks)] = sequence.blocks
        table[len(sequence.blocks) :] = 0
        index, offset = divmod(self._starts[row], self._block_size)
        self._slots[row] = sequence.blocks[index] * self._block_size + offset
        return True
