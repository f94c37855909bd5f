"""The instructions that widen weights to bfloat16 on NVIDIA GPUs, carried out in numpy for every number there is."""

import re

import numpy as np
import pytest

from kvloom.ops.gpu import linear_kernels


def run(code: str, words: np.ndarray) -> np.ndarray:
    """Carry out some PTX, which makes $0 of $1: 32 bits each."""
    registers = {"$1": words.astype(np.uint32)}

    def value(name: str) -> np.ndarray:
        return registers[name] if name in registers else np.full_like(words, int(name, 0), dtype=np.uint32)

    for line in code.strip(" {}").split(";"):
        name, target, *sources = re.split(r"[ ,]+", line.strip()) if line.strip() else ("", "")
        if name in ("", ".reg"):
            continue
        values = [value(source) for source in sources]
        registers[target] = {"mov.b32": move, "shr.b32": shift, "lop3.b32": logic, "fma.rn.bf16x2": fma}[name](*values)
    return registers["$0"]


def move(a: np.ndarray) -> np.ndarray:
    return a


def shift(a: np.ndarray, places: np.ndarray) -> np.ndarray:
    return a >> places


def logic(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
    """Each bit is looked up in a table of 8 bits, at a place that those of a, b and c write in binary."""
    result = np.zeros_like(a)
    for bit in range(32):
        place = (a >> bit & 1) * 4 + (b >> bit & 1) * 2 + (c >> bit & 1)
        result |= (table >> place & 1) << np.uint32(bit)
    return result


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Of two bf16 each; the results must be such, so that there is nothing to round."""
    halves = []
    for x, y, z in zip(*(bf16_pair(word) for word in (a, b, c)), strict=True):
        bits = (x.astype(np.float64) * y + z).astype(np.float32).view(np.uint32)
        assert not (bits & 0xFFFF).any()
        halves.append(bits >> 16)
    return halves[0] | halves[1] << 16


def bf16_pair(words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The low and the high bf16 of words, as fp32, of which a bf16 is the upper half."""
    return (words << 16).view(np.float32), (words & 0xFFFF0000).view(np.float32)


def packed(bits: int, place: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Words in whose low and high 16 bits all pairs of numbers lie at a place, noise beside them; and the numbers."""
    low, high = np.meshgrid(*[np.arange(2**bits, dtype=np.uint32)] * 2)
    at, ours = bits * place, (2**bits - 1) << (bits * place)
    noise = np.random.default_rng(0).integers(2**32, size=low.shape, dtype=np.uint32)
    return noise & ~np.uint32(ours << 16 | ours) | low << at | high << (at + 16), low, high


@pytest.mark.parametrize("place", [0, 1])
def test_bytes(place):
    words, *numbers = packed(8, place)
    got = bf16_pair(run(linear_kernels._bytes_to_bf16(place), words))
    for ours, expected in zip(got, numbers, strict=True):
        assert np.array_equal(ours, expected.astype(np.uint8).view(np.int8))


@pytest.mark.parametrize("middle", [8, -128])
@pytest.mark.parametrize("place", [0, 1, 2, 3])
def test_numbers_of_4_bits(place, middle):
    words, *numbers = packed(4, place)
    got = bf16_pair(run(linear_kernels._fours_to_bf16(place, middle), words))
    for ours, expected in zip(got, numbers, strict=True):
        assert np.array_equal(ours, expected.astype(np.int64) - middle)
