"""How the keys and values of a block lie in bytes: one codec per cache dtype."""

from dataclasses import dataclass

import torch

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [blocks, kv_heads, block_size, head_dim]."""


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """What a block holds: ``block_size`` tokens of every layer and KV head."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Keys and values as they are, in ``dtype``; a block is [layers, 2, kv_heads, block_size, head_dim].

    All layers of a block are neighbours in memory, so that moving a block is one copy.
    """

    dtype: torch.dtype

    def block_bytes(self, geometry: BlockGeometry) -> int:
        """Size of a block in bytes."""
        g = geometry
        return g.n_layers * 2 * g.n_kv_heads * g.block_size * g.head_dim * self.dtype.itemsize

    def layers(self, memory: torch.Tensor, geometry: BlockGeometry) -> list[LayerCache]:
        """View ``memory`` (uint8 [bytes]) as blocks; per layer its keys and values, strided over the blocks."""
        g = geometry
        size = self.block_bytes(g)
        count = memory.numel() // size
        # by blocks first: numpy gives memory of no bytes the stride 0, which has no view of another dtype
        rows = memory.view(count, size).view(self.dtype)
        blocks = rows.view(count, g.n_layers, 2, g.n_kv_heads, g.block_size, g.head_dim)
        return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(g.n_layers)]
