"""The floor of each case: its minimum time on a machine with known memory bandwidth and product rates.

A step reads all weights and all attended keys and values once, and multiplies every token with all weights. The floor
is the longer of the two times. The share of the floor that an engine reaches is comparable between machines.

The floor assumes that everything is read from memory. Some data may still be in the last-level cache from the previous
step. So a step can be slightly faster than its floor, and a single op whose weights are cached much faster.
"""

import math
from dataclasses import dataclass

from bench.cases import Case, Scale
from kvloom.models.spec import ModelSpec, tensor_shapes


@dataclass(frozen=True)
class Precision:
    """How weights are stored, and the dtype of their products.

    Attributes:
        bits: bits of a layer's weight including scales.
        head_bits: bits of a weight of the head.
        product: a key of ``Machine.operations``.
        kv_bytes: bytes of a number in keys and values.
    """

    bits: float
    head_bits: float
    product: str
    kv_bytes: int = 2


PRECISIONS = {
    "fp32": Precision(32, 32, "fp32"),
    "bf16": Precision(16, 16, "bf16"),
    # OpenVINO's int8, which keeps keys and values in 8 bits
    "int8": Precision(8, 8, "int8", kv_bytes=1),
    # Groups of 32 with a scale in 16 bits; the layers of w8a8 have groups of 64
    "int8_groups": Precision(8.5, 8.5, "int8"),
    "w8a8": Precision(8.25, 8.5, "int8"),
    # For 32 weights Q4_1 has a scale and an offset, Q4_0 and Q8_0 a scale, in 16 bits; Q6_K is the head of Q4_0 files
    "q4_1": Precision(5, 8.5, "int8"),
    "q4_0": Precision(4.5, 6.5625, "int8"),
}


@dataclass(frozen=True)
class Machine:
    """The machine's rates, see ``probe``.

    Attributes:
        bytes_per_s: bytes per second that all cores together read from memory.
        operations: multiplications and additions per second of torch's fastest matrix products, by dtype.
    """

    bytes_per_s: float
    operations: dict[str, float]


class Floors:
    """The floors of a model on a machine."""

    def __init__(self, machine: Machine, spec: ModelSpec, precision: str):
        self._kind = PRECISIONS[precision]
        self._machine = machine
        shapes = tensor_shapes(spec)
        self._head = spec.vocab_size * spec.hidden_size
        self._layers = sum(math.prod(shape) for name, shape in shapes.items() if name.startswith("layers."))
        self._kv_token = 2 * spec.n_layers * spec.n_kv_heads * spec.head_dim * self._kind.kv_bytes
        self._attention = 4 * spec.n_layers * spec.n_heads * spec.head_dim

    def product(self, rows: int, weights: int, head: bool = False) -> float:
        """Seconds to multiply ``rows`` rows with this number of weights, of the head or of layers."""
        read = weights * (self._kind.head_bits if head else self._kind.bits) / 8
        return self._longer(read, 2 * rows * weights)

    def attention(self, kv_read: float, pairs: float) -> float:
        """Seconds of all layers' attention. The arguments are those of ``step``."""
        return self._longer(self._kv_token * kv_read, self._attention * pairs)

    def step(self, tokens: int, sampled: int, kv_read: float, pairs: float) -> float:
        """Seconds of a step.

        Args:
            tokens: number of computed tokens.
            sampled: number of tokens with logits.
            kv_read: number of tokens whose keys and values are read from memory.
            pairs: number of pairs of a query and a key that it attends to.
        """
        weights = (self._layers * self._kind.bits + self._head * self._kind.head_bits) / 8
        operations = 2 * (tokens * self._layers + sampled * self._head) + self._attention * pairs
        return self._longer(weights + self._kv_token * kv_read, operations)

    def _longer(self, read: float, operations: float) -> float:
        rate = self._machine.operations[self._kind.product]
        return max(read / self._machine.bytes_per_s, operations / rate)

    def prefill(self, prompts: int, length: int, before: int = 0) -> float:
        """Seconds for ``length`` tokens of each prompt, after ``before`` shared tokens that are in the cache."""
        tokens = prompts * length
        return self.step(tokens, prompts, before, tokens * (before + length / 2))

    def decode(self, streams: int, own: float, shared: float = 0) -> float:
        """Seconds of a step with one token per stream, after ``own`` tokens of its own and ``shared`` common tokens."""
        return self.step(streams, streams, streams * own + shared, streams * (own + shared))

    def of(self, case: Case, scale: Scale) -> float:
        """The case's floor, in its unit."""
        n, steps = case.size, scale.new - 1
        if case.name == "decode":
            return n / self.decode(n, scale.prompt + scale.new / 2)
        if case.name == "total":
            return (
                n * scale.new / (self.prefill(n, scale.prompt) + steps * self.decode(n, scale.prompt + scale.new / 2))
            )
        if case.name == "prefill":
            return n / self.prefill(1, n)
        if case.name == "ttft_cold":
            return 1000 * self.prefill(1, scale.prefix + scale.suffix)
        if case.name == "ttft_warm":
            return 1000 * self.prefill(1, scale.suffix, scale.prefix)
        assert case.name == "shared"
        answers = steps * self.decode(n, scale.suffix + scale.new / 2, scale.prefix)
        return n * scale.new / (self.prefill(n, scale.suffix, scale.prefix) + answers)
