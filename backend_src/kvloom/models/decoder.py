"""The one decoder: embedding, layers of attention and gated MLP, head; a flat batch in, logits out."""

from dataclasses import dataclass

import torch

from kvloom.kv.codec import LayerCache
from kvloom.models.spec import ModelSpec, rope_inv_freq
from kvloom.ops.activation import silu_mul
from kvloom.ops.attention import paged_attention
from kvloom.ops.kv_write import rope_kv_write
from kvloom.ops.linear import pack_linear
from kvloom.ops.norm import add_rms_norm


@dataclass(frozen=True, slots=True)
class Batch:
    """A step's tokens, flat: prefill chunks and decodes of B sequences side by side.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], absolute.
        slots: int64 [T], where each token's keys and values go: block id * block_size + offset.
        query_starts: int32 [B + 1], offsets of the sequences into T.
        seq_lens: int32 [B], tokens of each sequence up to and with this step's.
        block_tables: int32 [B, M], padded with 0.
        logit_rows: int64 [R], the rows of T whose logits are wanted.
        max_queries: most tokens of one sequence in this step; known without asking the device.
        max_length: the longest of ``seq_lens``.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    query_starts: torch.Tensor
    seq_lens: torch.Tensor
    block_tables: torch.Tensor
    logit_rows: torch.Tensor
    max_queries: int
    max_length: int


class _Layer:
    def __init__(self, tensors: dict[str, torch.Tensor], prefix: str, dtype: torch.dtype):
        def take(*names: str) -> torch.Tensor:
            return torch.cat([tensors.pop(f"{prefix}.{name}.weight") for name in names]).to(dtype)

        self.attention_norm = take("input_layernorm")
        self.qkv = pack_linear(take("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"))
        self.attention_out = pack_linear(take("self_attn.o_proj"))
        self.mlp_norm = take("post_attention_layernorm")
        self.gate_up = pack_linear(take("mlp.gate_proj", "mlp.up_proj"))
        self.down = pack_linear(take("mlp.down_proj"))


class Decoder:
    """A decoder-only transformer over the paged cache.

    The residual stream is fp32 whatever the weights are: it costs little and is what keeps bf16 close to fp32.

    Args:
        spec: the model's shape.
        tensors: weights by canonical name; emptied, so that no weight is held twice.
        dtype: of weights and activations.
    """

    def __init__(self, spec: ModelSpec, tensors: dict[str, torch.Tensor], dtype: torch.dtype):
        self.spec = spec
        embedding = tensors.pop("embed_tokens.weight")
        head = embedding if spec.tied_embeddings else tensors.pop("lm_head.weight")
        self._embedding = embedding.to(dtype)
        self._head = pack_linear(head.to(dtype))
        self._layers = [_Layer(tensors, f"layers.{i}", dtype) for i in range(spec.n_layers)]
        self._norm = tensors.pop("norm.weight").to(dtype)
        assert not tensors, f"weights that no layer took: {sorted(tensors)}"
        # angles are fp32 as in the training code: more exact ones would be another function at large positions
        angles = torch.outer(torch.arange(spec.context_length, dtype=torch.float32), rope_inv_freq(spec))
        self._cos_sin = torch.cat((angles.cos(), angles.sin()), -1)

    def forward(self, batch: Batch, caches: list[LayerCache]) -> torch.Tensor:
        """Compute the batch, write its keys and values, return fp32 logits [R, vocab] of ``batch.logit_rows``."""
        spec, eps = self.spec, self.spec.norm_eps
        scale = spec.head_dim**-0.5
        residual = self._embedding[batch.tokens].float()
        update: torch.Tensor | None = None
        for layer, (k_cache, v_cache) in zip(self._layers, caches, strict=True):
            hidden, residual = add_rms_norm(residual, update, layer.attention_norm, eps)
            qkv = layer.qkv(hidden)
            q = rope_kv_write(qkv, self._cos_sin, batch.positions, batch.slots, k_cache, v_cache)
            mixed = paged_attention(
                q,
                k_cache,
                v_cache,
                batch.block_tables,
                batch.query_starts,
                batch.seq_lens,
                scale,
                max_queries=batch.max_queries,
                max_length=batch.max_length,
            )
            update = layer.attention_out(mixed.view(mixed.shape[0], -1))
            hidden, residual = add_rms_norm(residual, update, layer.mlp_norm, eps)
            update = layer.down(silu_mul(layer.gate_up(hidden)))
        assert update is not None, "a model has at least one layer"
        rows = batch.logit_rows
        hidden, _ = add_rms_norm(residual[rows], update[rows], self._norm, eps)
        return self._head(hidden, torch.float32)
