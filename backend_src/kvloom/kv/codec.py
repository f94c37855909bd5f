"""The memory layout of a block's keys and values: one codec per cache dtype."""

from dataclasses import dataclass

import torch

LayerCache = tuple[torch.Tensor, torch.Tensor]
"""Keys and values of one layer, each [blocks, kv_heads, block_size, head_dim]."""


@dataclass(frozen=True, slots=True)
class BlockGeometry:
    """A block's dimensions: it holds ``block_size`` tokens for every layer and KV head."""

    n_layers: int
    n_kv_heads: int
    head_dim: int
    block_size: int


@dataclass(frozen=True, slots=True)
class PlainCodec:
    """Stores keys and values unquantized in ``dtype``. A block is [layers, 2, kv_heads, block_size, head_dim].

    A block's layers are contiguous in memory, so that moving a block is one copy.
    """

    dtype: torch.dtype

    def block_bytes(self, geometry: BlockGeometry) -> int:
        """Size of a block in bytes."""
        g = geometry
        return g.n_layers * 2 * g.n_kv_heads * g.block_size * g.head_dim * self.dtype.itemsize

    def layers(self, memory: torch.Tensor, geometry: BlockGeometry) -> list[LayerCache]:
        """View ``memory`` (uint8 [bytes]) as blocks. Returns each layer's keys and values, strided over the blocks."""
        g = geometry
        size = self.block_bytes(g)
        count = memory.numel() // size
        # Split into blocks first: empty memory from numpy has stride 0 and can't be viewed as another dtype
        rows = memory.view(count, size).view(self.dtype)
        blocks = rows.view(count, g.n_layers, 2, g.n_kv_heads, g.block_size, g.head_dim)
        return [(blocks[:, layer, 0], blocks[:, layer, 1]) for layer in range(g.n_layers)]
