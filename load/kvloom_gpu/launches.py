"""All launches of an engine at real models' shapes: its decoder and sampler, without matrix products."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from unittest.mock import patch

import torch

import kvloom.ops.gpu
from kvloom.executor.gpu_step import GpuStep
from kvloom.executor.step_buffers import SamplingTensors
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Batch, Decoder
from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom.ops.gpu import use_triton_everywhere

CPU = torch.device("cpu")
BLOCK_SIZE = 32
CONTEXT = 8192
CHUNK = 512


@dataclass(frozen=True, slots=True)
class Shape:
    """The parts of a model's shape that affect the kernels. ``intermediate`` does not and is small."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden: int
    intermediate: int = 1536

    @property
    def name(self) -> str:
        """The width of a head, and how many query heads share a KV head."""
        return f"D{self.head_dim} G{self.n_heads // self.n_kv_heads}"

    def spec(self, layers: int = 1, vocab: int = 32_000, context: int = CONTEXT) -> ModelSpec:
        """A Llama of this shape."""
        return ModelSpec(
            family="llama",
            n_layers=layers,
            hidden_size=self.hidden,
            n_heads=self.n_heads,
            n_kv_heads=self.n_kv_heads,
            head_dim=self.head_dim,
            intermediate_size=self.intermediate,
            vocab_size=vocab,
            context_length=context,
            norm_eps=1e-5,
            rope_theta=500_000.0,
            rope_scaling=None,
            tied_embeddings=False,
        )


SHAPES = (
    Shape(9, 3, 64, 576),  # SmolLM2 135M
    Shape(24, 8, 128, 3072),  # Llama 3.2 3B
    Shape(32, 8, 64, 2048),  # Llama 3.2 1B
    Shape(32, 8, 128, 4096),  # Llama 3.1 8B
    Shape(64, 8, 64, 4096),
    Shape(64, 8, 128, 8192),  # Llama 3.1 70B
)
"""Heads of 64 and 128, with 3, 4 and 8 query heads per KV head."""


@dataclass(frozen=True, slots=True)
class Work:
    """Work that launches kernels.

    Attributes:
        shape: the shape of the model and the step, as text.
        launch: launches the kernels; ``use_triton_everywhere`` must be on.
    """

    shape: str
    launch: Callable[[], object]


def works(shapes: tuple[Shape, ...] = SHAPES, dtype: torch.dtype = torch.bfloat16) -> list[Work]:
    """Recorded decode steps of 1, 16 and 256 sequences, a prefill, and a prefill together with decodes."""
    found = []
    for shape in shapes:
        step = _step(shape, dtype)
        found += [Work(f"{shape.name} decode {size}", partial(step._decode, size)) for size in (1, 16, 256)]
        for name, counts in (("prefill", [CHUNK]), ("mixed", [CHUNK - 3, 1, 1, 1])):
            found.append(Work(f"{shape.name} {name}", partial(_run, step, counts)))
    return found


@contextmanager
def triton_everywhere(on: bool = True) -> Iterator[None]:
    """Let ops launch Triton kernels for tensors on the CPU, or not."""
    before = kvloom.ops.gpu._everywhere
    use_triton_everywhere(on)
    try:
        yield
    finally:
        use_triton_everywhere(before)


class _NoProduct:
    """Replaces a product if only the shape of its result matters."""

    def __init__(self, weight: torch.Tensor, *_: object):
        self._out_features = weight.shape[0]

    def __call__(self, x: torch.Tensor, out_dtype: torch.dtype | None = None) -> torch.Tensor:
        return torch.empty(x.shape[0], self._out_features, dtype=out_dtype or x.dtype)


def _step(shape: Shape, dtype: torch.dtype) -> GpuStep:
    spec = shape.spec()
    tensors = {name: torch.empty(size, dtype=dtype) for name, size in tensor_shapes(spec).items()}
    with patch("kvloom.models.decoder.pack_linear", _NoProduct):
        decoder = Decoder(spec, tensors, dtype)
    geometry = BlockGeometry(1, shape.n_kv_heads, shape.head_dim, BLOCK_SIZE)
    storage = Storage(PlainCodec(dtype), geometry, 16, CPU)
    return GpuStep(decoder, storage.layers, CHUNK, 256, CONTEXT, CPU)


def _run(step: GpuStep, counts: list[int]) -> None:
    """A step of chunks of these sizes, which samples a token for every sequence."""
    sequences, tokens = len(counts), sum(counts)
    starts = torch.tensor([0, *counts]).cumsum(0)
    batch = Batch(
        tokens=torch.zeros(tokens, dtype=torch.int64),
        positions=torch.zeros(tokens, dtype=torch.int64),
        slots=torch.zeros(tokens, dtype=torch.int64),
        query_starts=starts.int(),
        seq_lens=torch.full((sequences,), CHUNK, dtype=torch.int32),
        block_tables=torch.zeros(sequences, CHUNK // BLOCK_SIZE, dtype=torch.int32),
        logit_rows=starts[1:] - 1,
        max_queries=max(counts),
        max_length=CHUNK,
    )
    ones = torch.ones(sequences)
    step.run(batch, SamplingTensors(ones, ones, ones.long(), ones, ones.double()))
