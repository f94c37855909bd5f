"""The sizes of the GPU check: for an H200, or for a dry run on a CPU."""

from dataclasses import dataclass

import torch

from kvloom_gpu.launches import SHAPES, Shape

LLAMA_8B = Shape(32, 8, 128, 4096, 14336)
DRY = Shape(6, 2, 16, 48, 64)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes of all checks and timings.

    Attributes:
        device: the device.
        checked: dtypes of activations and cache, each with the models whose ops are checked in it.
        long: length of the longest sequence in a correctness check.
        chunk: tokens of the longest prefill chunk in a correctness check.
        sampled: rows of the sampler's checks.
        vocab: vocabulary of the sampler's checks and of the timed model.
        copy_bytes: bytes of the copy that measures the bandwidth.
        model: the shape of the timed model.
        layers: the number of its layers.
        decodes: (sequences, tokens of each) of timed decode steps.
        prefills: (tokens of the chunk, tokens before it) of timed prefill attention.
        pool_share: share of the free memory for the timed model's cache.
        repeats: how often a measurement is repeated.
        toy: the shape of the model whose tokens are compared.
        toy_sequences: its sequences at once, one less than in a recorded graph.
        toy_tokens: generated tokens of each sequence.
        peers: whether torch's attention is timed, too.
    """

    device: torch.device
    checked: tuple[tuple[torch.dtype, tuple[Shape, ...]], ...]
    long: int
    chunk: int
    sampled: int
    vocab: int
    copy_bytes: int
    model: Shape
    layers: int
    decodes: tuple[tuple[int, int], ...]
    prefills: tuple[tuple[int, int], ...]
    pool_share: float
    repeats: int
    toy: Shape
    toy_sequences: int
    toy_tokens: int
    peers: bool


def h200(device: torch.device) -> Sizes:
    """The sizes for a GPU with 140 GB."""
    return Sizes(
        device=device,
        # Each variant of a kernel takes about a second to compile
        checked=((torch.bfloat16, SHAPES), (torch.float32, SHAPES[::3])),
        long=8192,
        chunk=512,
        sampled=64,
        vocab=128_256,
        copy_bytes=4 << 30,
        model=LLAMA_8B,
        layers=32,
        decodes=((1, 1024), (1, 8192), (32, 1024), (32, 8192), (128, 1024), (128, 8192)),
        prefills=((512, 0), (512, 7680), (8192, 0)),
        pool_share=0.7,
        repeats=20,
        toy=Shape(8, 2, 64, 512, 1024),
        toy_sequences=15,
        toy_tokens=64,
        peers=True,
    )


def dry() -> Sizes:
    """The sizes for a dry run on a CPU in triton's interpreter, which takes seconds."""
    return Sizes(
        device=torch.device("cpu"),
        checked=((torch.float32, (DRY,)),),
        long=70,
        chunk=20,
        sampled=12,
        vocab=300,
        copy_bytes=1 << 20,
        model=Shape(4, 2, 16, 64, 96),
        layers=2,
        decodes=((1, 40), (3, 33)),
        prefills=((20, 0), (20, 13)),
        pool_share=0.0,
        repeats=1,
        toy=Shape(4, 2, 16, 64, 96),
        toy_sequences=3,
        toy_tokens=3,
        peers=True,
    )
