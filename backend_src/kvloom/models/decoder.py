"""The decoder: embedding, layers of attention and gated MLP, head. It takes a flat batch and returns logits."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from kvloom.kv.codec import LayerCache
from kvloom.models.spec import ModelSpec, rotary_table
from kvloom.ops.attention import paged_attention
from kvloom.ops.kv_write import rope_kv_write
from kvloom.ops.linear import (
    Linear,
    Weight,
    concat_rows,
    moved,
    pack_gated_linear,
    pack_linear,
    pack_rows,
    pack_tied_linear,
    plain,
)
from kvloom.ops.norm import add_rms_norm
from kvloom.ops.packed_memory import Allocate, HugePages

CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Batch:
    """The T tokens of one step, flat: prefill chunks and decodes of B sequences side by side.

    Attributes:
        tokens: int64 [T].
        positions: int64 [T], absolute.
        slots: int64 [T], the slot mapping: block id * block_size + offset for each token's keys and values.
        query_starts: int32 [B + 1], where each sequence begins in T.
        seq_lens: int32 [B], each sequence's length including this step's tokens.
        block_tables: int32 [B, M], padded with 0.
        logit_rows: int64 [R], the rows of T that need logits.
        max_queries: the most tokens of one sequence in this step. It is kept here to avoid a device sync.
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

    def to(self, device: torch.device) -> "Batch":
        """Copy the batch to another device."""
        return Batch(
            tokens=self.tokens.to(device),
            positions=self.positions.to(device),
            slots=self.slots.to(device),
            query_starts=self.query_starts.to(device),
            seq_lens=self.seq_lens.to(device),
            block_tables=self.block_tables.to(device),
            logit_rows=self.logit_rows.to(device),
            max_queries=self.max_queries,
            max_length=self.max_length,
        )


class WeightSource(Protocol):
    """Weights by canonical name. Each is taken once. A dict is one; others read a weight when it is taken."""

    def pop(self, name: str, /) -> Weight:
        """Take a weight."""

    def __len__(self) -> int:
        """The number of weights left."""


class _Layer:
    def __init__(
        self, tensors: WeightSource, prefix: str, dtype: torch.dtype, device: torch.device, allocate: Allocate
    ):
        def norm(name: str) -> torch.Tensor:
            return plain(tensors.pop(f"{prefix}.{name}.weight")).to(device, dtype)

        def weight(*names: str) -> Weight:
            return moved(concat_rows([tensors.pop(f"{prefix}.{name}.weight") for name in names]), device)

        def product(*names: str) -> Linear:
            return pack_linear(weight(*names), dtype, allocate)

        self.attention_norm = norm("input_layernorm")
        self.qkv = product("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
        self.attention_out = product("self_attn.o_proj")
        self.mlp_norm = norm("post_attention_layernorm")
        self.gate_up = pack_gated_linear(weight("mlp.gate_proj", "mlp.up_proj"), dtype, allocate)
        self.down = product("mlp.down_proj")


def _tables(
    spec: ModelSpec, tensors: WeightSource, dtype: torch.dtype, device: torch.device, allocate: Allocate
) -> tuple[Callable[[torch.Tensor], torch.Tensor], Linear]:
    """The embedding (int64 [T] to fp32 [T, hidden]) and the head."""
    table = moved(tensors.pop("embed_tokens.weight"), device)
    if spec.tied_embeddings:
        tied = pack_tied_linear(table, dtype, allocate)
        return tied.rows, tied
    head = pack_linear(moved(tensors.pop("lm_head.weight"), device), dtype, allocate)
    return pack_rows(table, allocate), head


class Decoder:
    """A decoder-only transformer over the paged cache.

    The residual stream is always fp32. That costs little and keeps bf16 results close to fp32.

    Args:
        spec: the model's shape; its context_length is how long sequences may get.
        tensors: weights by canonical name, plain ones in ``dtype``. Every weight is taken out, so that none is in
            memory twice.
        dtype: dtype of activations.
        device: where the weights are kept and the model runs.
    """

    def __init__(self, spec: ModelSpec, tensors: WeightSource, dtype: torch.dtype, device: torch.device = CPU):
        self.spec = spec
        allocate = HugePages()
        self._embedding, self._head = _tables(spec, tensors, dtype, device, allocate)
        self._layers = [_Layer(tensors, f"layers.{i}", dtype, device, allocate) for i in range(spec.n_layers)]
        self._norm = plain(tensors.pop("norm.weight")).to(device, dtype)
        assert not len(tensors), "some weights were not used by any layer"
        self._cos_sin = rotary_table(spec).to(device)

    def forward(self, batch: Batch, caches: list[LayerCache]) -> torch.Tensor:
        """Run the batch, write its keys and values to the cache, return fp32 logits [R, vocab] of its logit rows."""
        spec, eps = self.spec, self.spec.norm_eps
        scale = spec.head_dim**-0.5
        residual = self._embedding(batch.tokens)
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
            # The last layer only has to write keys and values for tokens that need no logits
            wanted = batch.logit_rows if layer is self._layers[-1] else None
            hidden, residual = add_rms_norm(residual, update, layer.mlp_norm, eps, wanted)
            update = layer.down(layer.gate_up(hidden))
        assert update is not None, "a model has at least one layer"
        hidden, _ = add_rms_norm(residual, update, self._norm, eps)
        return self._head(hidden, torch.float32)
