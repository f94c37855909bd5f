"""Computes a step on a GPU: one copy to it, one launch or many, one copy back and one wait."""

import torch

from kvloom.executor.device import current
from kvloom.executor.graphs import DecodeGraphs, Record, graph_sizes
from kvloom.executor.step_buffers import SamplingTensors, StepBuffers
from kvloom.kv.blocks import blocks_for
from kvloom.kv.codec import LayerCache
from kvloom.models.decoder import Batch, Decoder
from kvloom.ops.sampling import sample_tokens


class GpuStep:
    """Computes steps on static buffers. After ``record_graphs`` decode steps replay recorded graphs.

    Args:
        decoder: the model.
        layers: each layer's keys and values in the cache.
        tokens: maximum number of tokens in a step.
        sequences: maximum number of sequences in a step.
        context_length: longest sequence in tokens.
        device: the model's device. For tests it may be the CPU.

    Attributes:
        logits: fp32 [sequences, vocab]. The first rows are the last step's logits.
    """

    def __init__(
        self,
        decoder: Decoder,
        layers: list[LayerCache],
        tokens: int,
        sequences: int,
        context_length: int,
        device: torch.device,
    ):
        self._decoder = decoder
        self._layers = layers
        self._max_sequences = sequences
        self._largest_step = tokens
        self._context_length = context_length
        self._device = device
        self._block_size = layers[0][0].shape[2]
        self._buffers = StepBuffers(tokens, sequences, blocks_for(context_length, self._block_size), device)
        # These are outside of the graphs' memory pool, where another graph would overwrite them
        self.logits = torch.zeros(sequences, decoder.spec.vocab_size, dtype=torch.float32, device=device)
        self._tokens = torch.zeros(sequences, dtype=torch.int64, device=device)
        self._host_tokens = torch.zeros(sequences, dtype=torch.int64, pin_memory=device.type == "cuda")
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        self._samples = 0
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def record_graphs(self, record: Record) -> None:
        """Record decode steps of every padded size. Nothing is written to the cache.

        This also runs eager steps of prefill chunks beside decodes, so that their kernels are compiled before the first
        request. A product with quantized weights has one kernel for each power of two up to 64 rows.
        """
        for tokens in sorted({min(tokens, self._largest_step) for tokens in (8, 16, 32, 64, self._largest_step)}):
            self.run(*self._to_nowhere(tokens))
        self._buffers.pad_all(self._max_sequences)
        sizes = graph_sizes(self._max_sequences)
        for size in sizes:
            # Compiles kernels and lets cuBLAS choose its kernels
            self._decode(size)
        self._graphs = DecodeGraphs(sizes, self._decode, record)

    @torch.inference_mode()
    def run(self, batch: Batch, draws: SamplingTensors) -> list[int]:
        """Compute a step.

        Args:
            batch: the step's tokens, on the host.
            draws: how to sample each of ``batch.logit_rows``, on the host.

        Returns:
            A token, or NOT_FINITE, for each of ``batch.logit_rows``.
        """
        self.launch(batch, draws)
        return self.finish()

    @torch.inference_mode()
    def launch(self, batch: Batch, draws: SamplingTensors) -> None:
        """Launch a step without waiting for the GPU. For the arguments see ``run``."""
        with current(self._device):
            self._launch(batch, draws)

    def finish(self) -> list[int]:
        """Wait for the last launched step, unless it samples nothing. Returns the same as ``run``."""
        if not self._samples:
            return []
        if self._done is not None:
            self._done.synchronize()
        return self._host_tokens[: self._samples].tolist()

    def _launch(self, batch: Batch, draws: SamplingTensors) -> None:
        samples, sequences = len(batch.logit_rows), len(batch.seq_lens)
        size = self._graph_size(batch)
        self._buffers.send(batch, draws, size)
        if size is not None:
            assert self._graphs is not None
            self._graphs.replay(size)
        else:
            # Kernels are compiled for a maximum length. With one length for all steps none is compiled while serving
            there = self._buffers.batch(len(batch.tokens), sequences, samples, batch.max_queries, self._context_length)
            self._compute(there, self._buffers.draws(samples))
        self._samples = samples
        self._host_tokens[:samples].copy_(self._tokens[:samples], non_blocking=True)
        if self._done is not None:
            self._done.record()

    def _to_nowhere(self, max_sequences: int) -> tuple[Batch, SamplingTensors]:
        """A prefill chunk beside a decode. They write no keys and values, and read the first block only."""
        two = max_sequences > 1 and self._max_sequences > 1
        counts = [min(max_sequences - 1, self._context_length), 1] if two else [1]
        rows, tokens = len(counts), sum(counts)
        starts = torch.tensor([0, *counts]).cumsum(0)
        zeros, ones = torch.zeros(rows), torch.ones(rows)
        batch = Batch(
            tokens=torch.zeros(tokens, dtype=torch.int64),
            positions=torch.zeros(tokens, dtype=torch.int64),
            slots=torch.full((tokens,), -1),
            query_starts=starts.int(),
            seq_lens=torch.tensor(counts, dtype=torch.int32),
            block_tables=torch.zeros(rows, blocks_for(max(counts), self._block_size), dtype=torch.int32),
            logit_rows=starts[1:] - 1,
            max_queries=max(counts),
            max_length=max(counts),
        )
        return batch, SamplingTensors(ones, zeros, ones.long(), ones, zeros.double())

    def _graph_size(self, batch: Batch) -> int | None:
        """The number of sequences of the graph for this step; None if there is no graph for it."""
        one_token_each = len(batch.tokens) == len(batch.seq_lens) == len(batch.logit_rows)
        return self._graphs.padded(len(batch.seq_lens)) if self._graphs is not None and one_token_each else None

    def _decode(self, size: int) -> None:
        batch = self._buffers.batch(size, size, size, max_queries=1, max_length=self._context_length)
        self._compute(batch, self._buffers.draws(size))

    def _compute(self, batch: Batch, draws: SamplingTensors) -> None:
        logits = self._decoder.forward(batch, self._layers)
        rows = len(logits)
        if rows:
            self.logits[:rows] = logits
            self._tokens[:rows] = sample_tokens(logits, *draws.tensors)[0]
