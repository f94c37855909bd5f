"""A Llama's forward pass in float64, the reference for fp32 logits.

It is written from the architecture's definition, shares no code with kvloom or transformers, and computes differently
if there is a choice.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch


class Float64Llama:
    """A model whose weights and operations are all float64.

    Args:
        config: a LlamaConfig of transformers.
        tensors: weights of any float dtype, by their names in Hugging Face checkpoints.
    """

    def __init__(self, config: Any, tensors: Mapping[str, torch.Tensor]):
        self._config = config
        self._tensors = {name: tensor.double() for name, tensor in tensors.items()}
        self._frequencies = _rope_frequencies(config.head_dim, config.rope_parameters)

    def logits(self, ids: Sequence[int]) -> torch.Tensor:
        """Logits [T, vocab] of every position of one text."""
        embedding = self._tensors["model.embed_tokens.weight"]
        stream = embedding[list(ids)]
        for i in range(self._config.num_hidden_layers):
            layer = f"model.layers.{i}"
            stream = stream + self._attention(self._norm(stream, f"{layer}.input_layernorm"), f"{layer}.self_attn")
            stream = stream + self._mlp(self._norm(stream, f"{layer}.post_attention_layernorm"), f"{layer}.mlp")
        head = embedding if self._config.tie_word_embeddings else self._tensors["lm_head.weight"]
        return self._norm(stream, "model.norm") @ head.T

    def _linear(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return x @ self._tensors[f"{name}.weight"].T

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        mean_square = (x * x).mean(-1, keepdim=True)
        return x / torch.sqrt(mean_square + self._config.rms_norm_eps) * self._tensors[f"{name}.weight"]

    def _attention(self, x: torch.Tensor, name: str) -> torch.Tensor:
        config, count = self._config, len(x)
        q = self._rotate(self._linear(x, f"{name}.q_proj").view(count, config.num_attention_heads, config.head_dim))
        k = self._rotate(self._linear(x, f"{name}.k_proj").view(count, config.num_key_value_heads, config.head_dim))
        v = self._linear(x, f"{name}.v_proj").view(count, config.num_key_value_heads, config.head_dim)
        group = config.num_attention_heads // config.num_key_value_heads
        future = torch.ones(count, count, dtype=torch.bool).triu(1)
        heads = []
        for head in range(config.num_attention_heads):
            scores = q[:, head] @ k[:, head // group].T / math.sqrt(config.head_dim)
            heads.append(scores.masked_fill(future, -math.inf).softmax(-1) @ v[:, head // group])
        return self._linear(torch.cat(heads, -1), f"{name}.o_proj")

    def _rotate(self, x: torch.Tensor) -> torch.Tensor:
        """RoPE: dimensions i and i + head_dim / 2 are a complex number that rotates with the position."""
        real, imaginary = x.chunk(2, -1)
        angles = torch.arange(len(x), dtype=torch.float64)[:, None] * self._frequencies
        turned = torch.complex(real, imaginary) * torch.polar(torch.ones_like(angles), angles)[:, None]
        return torch.cat((turned.real, turned.imag), -1)

    def _mlp(self, x: torch.Tensor, name: str) -> torch.Tensor:
        gate = self._linear(x, f"{name}.gate_proj")
        return self._linear(gate / (1 + torch.exp(-gate)) * self._linear(x, f"{name}.up_proj"), f"{name}.down_proj")


def _rope_frequencies(head_dim: int, rope: Mapping[str, Any]) -> torch.Tensor:
    frequencies = [rope["rope_theta"] ** (-2 * i / head_dim) for i in range(head_dim // 2)]
    if rope["rope_type"] == "llama3":
        frequencies = [_llama3(frequency, rope) for frequency in frequencies]
    else:
        assert rope["rope_type"] == "default", rope
    return torch.tensor(frequencies, dtype=torch.float64)


def _llama3(frequency: float, rope: Mapping[str, Any]) -> float:
    # Number of turns within the original context: below low divide, above high keep, interpolate between them
    turns = rope["original_max_position_embeddings"] * frequency / (2 * math.pi)
    keep = (turns - rope["low_freq_factor"]) / (rope["high_freq_factor"] - rope["low_freq_factor"])
    keep = min(max(keep, 0.0), 1.0)
    return keep * frequency + (1 - keep) * frequency / rope["factor"]
