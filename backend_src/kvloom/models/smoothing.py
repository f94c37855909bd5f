"""SmoothQuant (Xiao et al., 2022): moves outliers of activations into the next weights before both become INT8.

Each channel of a norm's output is divided by s = peak(x)^a / peak(W)^(1 - a), and the weights that read it are
multiplied by s. The function stays the same, but the channels' peaks become similar. The channels of silu(gate) * up
are divided in the rows of up's weight. The peaks of activations are measured on the text below.
"""

from collections.abc import Callable, Sequence

import torch

from kvloom.models.spec import ModelSpec, rope_inv_freq

NORM_ALPHA = 0.7
UP_ALPHA = 0.5
"""The exponent a. Within the paper's range, these lose least with the default model and groups of 64."""

LEAST = 1e-5
"""Smaller peaks count as this."""

MAX_TOKENS = 256
"""The most tokens of the text that are used."""

TEXT = """\
The lighthouse keeper wrote the weather down at six every morning: wind from the north-west, 14 knots, visibility good.
"Nothing passed in the night," she told the harbour master, "but for two trawlers and a coaster bound for Bergen."
He asked: how many litres of oil are left? About 340, she said, which is enough for 17 days at 20 litres a day.

To sort a list in Python, call sorted(items, key=lambda item: item.price); it returns a new list and leaves the old one
as it was. In C, qsort(array, n, sizeof array[0], compare) sorts in place.

| city | inhabitants | founded |
|---|---|---|
| Lisbon | 545,000 | about 1200 BC |
| Vienna | 2,006,000 | 15 BC |

Photosynthesis turns carbon dioxide and water into sugar and oxygen; its light reactions happen in the thylakoids.
Q: Is it right that sound can't travel through a vacuum? A: Yes. Sound is a wave of pressure, and needs a medium.
"""
"""Written for kvloom: prose, speech, numbers, code and a table."""


def smoothing(
    spec: ModelSpec, read: Callable[[str], torch.Tensor], token_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """Compute the factors s by running the model on a text.

    Args:
        spec: the model's shape.
        read: returns a weight in fp32 by its canonical name. Every layer's weights are read once and not kept.
        token_ids: the text. At most ``MAX_TOKENS`` of them are used.

    Returns:
        By name of a norm's weight: what to divide it by, fp32 [hidden]. By name of an MLP's up weight: what to divide
        its rows by, fp32 [intermediate].
    """
    factors = {}
    count = min(len(token_ids), MAX_TOKENS, spec.context_length)
    x = read("embed_tokens.weight")[list(token_ids[:count])]
    angles = torch.outer(torch.arange(count, dtype=torch.float32), rope_inv_freq(spec))
    angles = torch.cat((angles, angles), -1)

    def normed(name: str) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (spec.hidden_size,), read(name), spec.norm_eps)

    def factor(alpha: float, inputs: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        peaks = inputs.abs().amax(0).clamp(min=LEAST)
        weight = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=LEAST)
        return peaks**alpha / weight ** (1 - alpha)

    def heads(product: torch.Tensor) -> torch.Tensor:
        return product.view(count, -1, spec.head_dim).transpose(0, 1)

    def rotated(product: torch.Tensor) -> torch.Tensor:
        x = heads(product)
        first, second = x.chunk(2, -1)
        return x * angles.cos() + torch.cat((-second, first), -1) * angles.sin()

    for i in range(spec.n_layers):
        layer = f"layers.{i}"
        name = f"{layer}.input_layernorm.weight"
        hidden = normed(name)
        q, k, v = (read(f"{layer}.self_attn.{part}_proj.weight") for part in "qkv")
        factors[name] = factor(NORM_ALPHA, hidden, q, k, v)
        group = spec.n_heads // spec.n_kv_heads
        keys, values = (part.repeat_interleave(group, 0) for part in (rotated(hidden @ k.T), heads(hidden @ v.T)))
        mixed = torch.nn.functional.scaled_dot_product_attention(rotated(hidden @ q.T), keys, values, is_causal=True)
        x = x + mixed.transpose(0, 1).reshape(count, -1) @ read(f"{layer}.self_attn.o_proj.weight").T
        name = f"{layer}.post_attention_layernorm.weight"
        hidden = normed(name)
        gate, up = (read(f"{layer}.mlp.{part}_proj.weight") for part in ("gate", "up"))
        factors[name] = factor(NORM_ALPHA, hidden, gate, up)
        activated = torch.nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)
        down = read(f"{layer}.mlp.down_proj.weight")
        factors[f"{layer}.mlp.up_proj.weight"] = factor(UP_ALPHA, activated, down)
        x = x + activated @ down.T
    return factors
