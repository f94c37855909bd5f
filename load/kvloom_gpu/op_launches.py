"""The launches of all ops except attention, at real shapes: products with quantized weights, sampling, small ops."""

from functools import partial

import torch

from kvloom.ops.activation import silu_mul
from kvloom.ops.gpu.linear import QuantizedLinear
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.penalties import Edits
from kvloom.ops.sampling import greedy, sample_tokens
from kvloom_gpu.launches import Work

VOCABULARIES = (32_000, 49_152, 128_256, 151_936, 262_144)
"""Llama 2, SmolLM2, Llama 3, Qwen 3, Gemma 3."""


def op_works() -> list[Work]:
    """Norms, activations, sampling, products."""
    works = [Work(f"norm {hidden}", partial(_norm, hidden)) for hidden in (576, 2048, 4096, 8192)]
    works += [Work(f"silu {width}", partial(_silu, width)) for width in (1536, 14_336)]
    works += [Work(f"pick {vocab}", partial(_pick, vocab)) for vocab in VOCABULARIES]
    works += [Work("greedy 128256", _greedy)]
    # Each number of rows per program, and in_features that are no multiple of a block
    for out_features, in_features, rows in (*((4096, 4096, rows) for rows in (1, 16, 32, 64, 512)), (1536, 576, 1)):
        for bits, group, minima in ((8, 32, False), (4, 32, False), (4, 32, True), (4, 128, False), (4, 128, True)):
            shape = f"{in_features} to {out_features}, {rows} rows"
            name = f"int{bits} by {group}{' and minima' if minima else ''} {shape}"
            works.append(Work(name, partial(_quantized, out_features, in_features, rows, bits, group, minima)))
    works.append(Work("rows of int8", _quantized_rows))
    return works


def _bf16(*shape: int) -> torch.Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16)


def _silu(width: int) -> None:
    silu_mul(_bf16(4, 2 * width))


def _greedy() -> None:
    greedy(torch.empty(4, 128_256))


def _norm(hidden: int) -> None:
    residual, update, weight = torch.empty(4, hidden), _bf16(4, hidden), _bf16(hidden)
    add_rms_norm(residual, None, weight, 1e-5)
    add_rms_norm(residual, update, weight, 1e-5)
    add_rms_norm(residual, update, weight, 1e-5, torch.zeros(2, dtype=torch.int64))


def _pick(vocab: int) -> None:
    rows = torch.empty(4)
    wide = rows.double()
    bias, repetition, subtracted = torch.empty(3, 64, dtype=torch.float64)
    edits = Edits(torch.zeros(64, dtype=torch.int64), bias, repetition, subtracted, torch.empty(64).bool())
    sample_tokens(torch.empty(4, vocab), rows, rows, rows.long(), rows, wide, edits)


def _quantized(out_features: int, in_features: int, rows: int, bits: int, group: int, minima: bool) -> None:
    _linear(out_features, in_features, bits, group, minima)(_bf16(rows, in_features))


def _quantized_rows() -> None:
    _linear(4096, 576, 8, 32, False).rows(torch.zeros(3, dtype=torch.int64))


def _linear(out_features: int, in_features: int, bits: int, group: int, minima: bool) -> QuantizedLinear:
    values = torch.zeros(out_features, in_features, dtype=torch.int8 if bits == 8 else torch.uint8)
    scales = torch.ones(out_features, -(-in_features // group), dtype=torch.float16)
    return QuantizedLinear(bits, values, scales, scales if minima else None, group)
