"""SmoothQuant (Xiao et al., 2022): outliers of activations moved into the weights behind, before both become INT8.

A channel of a norm's output is divided by s = peak(x)^a / peak(W)^(1 - a), and the weights that take it are multiplied
by s: the same function, with channels whose peaks are alike. A channel of silu(gate) * up is divided where up's product
makes it. Peaks of activations are those of a text, below.
"""

from collections.abc import Callable, Sequence

import torch

from kvloom.models.spec import ModelSpec, rope_inv_freq

NORM_ALPHA = 0.7
UP_ALPHA = 0.5
"""How much of the outliers moves: of the paper's range, what loses least with the default model and groups of 64."""

LEAST = 1e-5
"""No peak counts as smaller than this."""

MAX_TOKENS = 256
"""Tokens of the text that are computed."""

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
"""Some of what models read: prose, speech, numbers, code, a table. Of our own making."""


def smoothing(
    spec: ModelSpec, read: Callable[[str], torch.Tensor], token_ids: Sequence[int]
) -> dict[str, torch.Tensor]:
    """What makes the inputs of quantized products, and is to be divided.

    Args:
        spec: the model's shape.
        read: canonical name to its weight in fp32; every layer is read once and let go.
        token_ids: the text; at most ``MAX_TOKENS`` of it are computed.

    Returns:
        Name of a norm to what its weight is divided by, fp32 [hidden]; of an MLP's up product to what its weight's rows
        are, fp32 [intermediate].
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
