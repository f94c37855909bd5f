"""A model's shape, its rotary frequencies, and the names and shapes of its tensors. No weights and no files."""

import math
from dataclasses import astuple, dataclass, fields

import torch

from kvloom.errors import ModelError


@dataclass(frozen=True, slots=True)
class LinearScaling:
    """RoPE scaling that divides all frequencies by one factor."""

    factor: float


@dataclass(frozen=True, slots=True)
class Llama3Scaling:
    """RoPE scaling of Llama 3.1. Frequencies of long wavelengths are divided by ``factor``, short ones are kept.

    In between the scaling changes gradually.
    """

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_context_length: int


_ROWS = 8192
"""Positions for which ``rotary_table`` computes angles at once."""

RopeScaling = LinearScaling | Llama3Scaling | tuple[float, ...]
"""A rule, or one divisor per frequency [head_dim / 2]. GGUF files store Llama 3.1's rule as divisors."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """A decoder's shape.

    Attributes:
        family: the name of the family in ``families.FAMILIES``.
        n_layers: decoder layers.
        hidden_size: width of the residual stream.
        n_heads: query heads; a multiple of ``n_kv_heads``.
        n_kv_heads: key and value heads.
        head_dim: width of a head; even, and not always hidden_size / n_heads.
        intermediate_size: width of the gated MLP.
        vocab_size: rows of the embedding and of the head.
        context_length: longest sequence the model was made for, in tokens.
        norm_eps: epsilon of every RMSNorm.
        rope_theta: base of the rotary frequencies.
        rope_scaling: how the frequencies are scaled; None for no scaling.
        tied_embeddings: whether the embedding is also the head. Then there is no ``lm_head.weight``.

    Raises:
        ModelError: a value is impossible. The message names it.
    """

    family: str
    n_layers: int
    hidden_size: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    context_length: int
    norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tied_embeddings: bool

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.type in (int, float) and not _positive(value):
                raise ModelError(f"{field.name}={value} must be positive")
        if self.n_heads % self.n_kv_heads:
            raise ModelError(f"n_heads={self.n_heads} is not a multiple of n_kv_heads={self.n_kv_heads}")
        if self.head_dim % 2:
            raise ModelError(f"head_dim={self.head_dim} is odd, so rotary embeddings can't be applied")
        scaling = self.rope_scaling
        if isinstance(scaling, tuple):
            if len(scaling) != self.head_dim // 2:
                raise ModelError(f"{len(scaling)} RoPE frequency factors for head_dim={self.head_dim}")
            if not all(map(_positive, scaling)):
                raise ModelError("a RoPE frequency factor is not positive")
        elif scaling is not None and not all(map(_positive, astuple(scaling))):
            raise ModelError(f"{scaling}: every value must be positive")
        if isinstance(scaling, Llama3Scaling) and scaling.high_freq_factor <= scaling.low_freq_factor:
            raise ModelError(f"{scaling}: high_freq_factor must be above low_freq_factor")


def _positive(value: float) -> bool:
    return value > 0 and math.isfinite(value)


def rope_inv_freq(spec: ModelSpec) -> torch.Tensor:
    """Rotary frequencies, fp32 [head_dim / 2], bit-identical to those of transformers."""
    # The same operations in the same order as in transformers: any other form differs in the last bit
    inv_freq = 1.0 / (spec.rope_theta ** (torch.arange(0, spec.head_dim, 2, dtype=torch.float) / spec.head_dim))
    scaling = spec.rope_scaling
    if scaling is None:
        return inv_freq
    if isinstance(scaling, tuple):
        return inv_freq / torch.tensor(scaling, dtype=torch.float)
    if isinstance(scaling, LinearScaling):
        return inv_freq / scaling.factor
    return _llama3(inv_freq, scaling)


def rotary_table(spec: ModelSpec) -> torch.Tensor:
    """Cosines and sines of every position's angles, fp32 [context_length, head_dim]: first the cosines."""
    inv_freq = rope_inv_freq(spec)
    table = torch.empty(spec.context_length, spec.head_dim)
    # In parts, because a long context's angles, cosines and sines would take more memory than the table
    for begin in range(0, spec.context_length, _ROWS):
        # fp32 angles as in the training code: more exact angles would change the results at large positions
        positions = torch.arange(begin, min(begin + _ROWS, spec.context_length), dtype=torch.float32)
        angles = torch.outer(positions, inv_freq)
        table[begin : begin + _ROWS] = torch.cat((angles.cos(), angles.sin()), -1)
    return table


def _llama3(inv_freq: torch.Tensor, scaling: Llama3Scaling) -> torch.Tensor:
    low, high, context = scaling.low_freq_factor, scaling.high_freq_factor, scaling.original_context_length
    wavelength = 2 * math.pi / inv_freq
    scaled = torch.where(wavelength > context / low, inv_freq / scaling.factor, inv_freq)
    smooth = (context / wavelength - low) / (high - low)
    smoothed = (1 - smooth) * scaled / scaling.factor + smooth * scaled
    ramp = ~(wavelength < context / high) & ~(wavelength > context / low)
    return torch.where(ramp, smoothed, scaled)


def tensor_shapes(spec: ModelSpec) -> dict[str, tuple[int, ...]]:
    """The name and shape of every tensor that the model needs. Linear weights are [out, in].

    The canonical names are those of Hugging Face checkpoints without the leading ``model.``.
    """
    hidden, mlp = spec.hidden_size, spec.intermediate_size
    q_rows, kv_rows = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    layer = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (q_rows, hidden),
        "self_attn.k_proj": (kv_rows, hidden),
        "self_attn.v_proj": (kv_rows, hidden),
        "self_attn.o_proj": (hidden, q_rows),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (mlp, hidden),
        "mlp.up_proj": (mlp, hidden),
        "mlp.down_proj": (hidden, mlp),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (spec.vocab_size, hidden)}
    for i in range(spec.n_layers):
        shapes |= {f"layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    shapes["norm.weight"] = (hidden,)
    if not spec.tied_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    return shapes
