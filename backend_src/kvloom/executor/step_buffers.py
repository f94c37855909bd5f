"""The inputs of a step on a GPU, at fixed addresses and sent in one copy."""

from dataclasses import dataclass

import torch

from kvloom.models.decoder import Batch

_ALIGNMENT = 256
"""Every field begins at a multiple of this many bytes, so that kernels can use vector loads."""

_TABLE_STEP = 16
"""The row length of the block tables is a multiple of this, because kernels optimize divisible strides."""


@dataclass(frozen=True, slots=True)
class SamplingTensors:
    """How to sample each of R rows; see ``ops.sampling.sample_tokens``.

    Attributes:
        temperature: fp32 [R]; 0 is greedy.
        min_p: fp32 [R].
        top_k: int64 [R].
        top_p: fp32 [R].
        uniform: fp64 [R].
    """

    temperature: torch.Tensor
    min_p: torch.Tensor
    top_k: torch.Tensor
    top_p: torch.Tensor
    uniform: torch.Tensor

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """The tensors in the order of the arguments in ``ops.sampling``."""
        return self.temperature, self.min_p, self.top_k, self.top_p, self.uniform


class StepBuffers:
    """Buffers for the inputs of the largest step, in pinned host memory and on the device.

    Eager and recorded steps read the same addresses. A recorded step has a fixed number of sequences and is padded.
    A padding sequence has length 0 and one token with slot -1, so that its keys and values are not written.

    Args:
        tokens: maximum number of tokens in a step.
        sequences: maximum number of sequences in a step.
        blocks: maximum number of blocks of a sequence.
        device: where the step is computed.
    """

    def __init__(self, tokens: int, sequences: int, blocks: int, device: torch.device):
        rows = {
            "query_starts": (torch.int32, sequences + 1),
            "seq_lens": (torch.int32, sequences),
            "logit_rows": (torch.int64, sequences),
            "temperature": (torch.float32, sequences),
            "min_p": (torch.float32, sequences),
            "top_k": (torch.int64, sequences),
            "top_p": (torch.float32, sequences),
            "uniform": (torch.float64, sequences),
        }
        flat = {name: (torch.int64, max(tokens, sequences)) for name in ("tokens", "positions", "slots")}
        width = -(-blocks // _TABLE_STEP) * _TABLE_STEP
        # The block tables come last: they are the largest field, and only rows in use are sent
        layout = {**rows, **flat, "block_tables": (torch.int32, sequences * width)}
        size = sum(_padded(dtype, count) for dtype, count in layout.values())
        self._on_host = torch.zeros(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.zeros(size, dtype=torch.uint8, device=device)
        self._host, self._device = _carve(self._on_host, layout), _carve(self._on_device, layout)
        for fields in (self._host, self._device):
            fields["block_tables"] = fields["block_tables"].view(sequences, width)
        self._fixed = size - _padded(*layout["block_tables"])
        self._row_bytes = width * torch.int32.itemsize
        self._sent = torch.cuda.Event() if device.type == "cuda" else None

    def send(self, batch: Batch, draws: SamplingTensors, sequences: int | None = None) -> None:
        """Copy a step to the device, without waiting for the copy.

        Args:
            batch: the step's tokens, on the host.
            draws: how to sample each of ``batch.logit_rows``, on the host.
            sequences: pad to this many sequences of one token each; None: no padding.
        """
        if self._sent is not None:
            # The host's memory must not change before the last copy from it is done
            self._sent.synchronize()
        count, width = batch.block_tables.shape
        self._host["block_tables"][:count, :width] = batch.block_tables
        for name in ("tokens", "positions", "slots", "query_starts", "seq_lens", "logit_rows"):
            _put(self._host[name], getattr(batch, name))
        for name in SamplingTensors.__slots__:
            _put(self._host[name], getattr(draws, name))
        if sequences is not None and sequences > count:
            self._pad(count, sequences)
        used = self._fixed + max(count, sequences or 0) * self._row_bytes
        self._on_device[:used].copy_(self._on_host[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()

    def batch(self, tokens: int, sequences: int, samples: int, max_queries: int, max_length: int) -> Batch:
        """The device's batch for a step of so many tokens, sequences and rows that need logits."""
        fields = self._device
        return Batch(
            tokens=fields["tokens"][:tokens],
            positions=fields["positions"][:tokens],
            slots=fields["slots"][:tokens],
            query_starts=fields["query_starts"][: sequences + 1],
            seq_lens=fields["seq_lens"][:sequences],
            block_tables=fields["block_tables"][:sequences],
            logit_rows=fields["logit_rows"][:samples],
            max_queries=max_queries,
            max_length=max_length,
        )

    def draws(self, samples: int) -> SamplingTensors:
        """The device's sampling parameters for the first ``samples`` rows."""
        return SamplingTensors(**{name: self._device[name][:samples] for name in SamplingTensors.__slots__})

    def pad_all(self, sequences: int) -> None:
        """Fill the device's buffers with ``sequences`` padding sequences."""
        self._pad(0, sequences)
        self._on_device.copy_(self._on_host)

    def _pad(self, count: int, sequences: int) -> None:
        host, padding = self._host, slice(count, sequences)
        host["tokens"][padding] = 0
        host["positions"][padding] = 0
        host["slots"][padding] = -1
        host["seq_lens"][padding] = 0
        host["query_starts"][count : sequences + 1] = torch.arange(count, sequences + 1, dtype=torch.int32)
        host["logit_rows"][padding] = torch.arange(count, sequences)
        host["temperature"][padding] = 0
        host["min_p"][padding] = 0
        host["top_k"][padding] = 1
        host["top_p"][padding] = 1
        host["uniform"][padding] = 0


def _put(target: torch.Tensor, values: torch.Tensor) -> None:
    assert values.dtype is target.dtype
    target[: len(values)] = values


def _padded(dtype: torch.dtype, count: int) -> int:
    return -(-dtype.itemsize * count // _ALIGNMENT) * _ALIGNMENT


def _carve(memory: torch.Tensor, layout: dict[str, tuple[torch.dtype, int]]) -> dict[str, torch.Tensor]:
    """View a buffer as the fields of a layout, in order."""
    fields, start = {}, 0
    for name, (dtype, count) in layout.items():
        fields[name] = memory[start : start + dtype.itemsize * count].view(dtype)
        start += _padded(dtype, count)
    return fields
