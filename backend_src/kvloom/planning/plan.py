"""Plans memory: the sizes of weights, cache and a step's tensors, and how many sequences fit."""

from bisect import bisect_right
from dataclasses import dataclass, replace

from kvloom.config import Settings
from kvloom.errors import SettingsError
from kvloom.kv.blocks import blocks_for
from kvloom.kv.codec import BlockGeometry
from kvloom.models import footprint, gpu_footprint
from kvloom.models.spec import ModelSpec
from kvloom.planning.dtypes import CODECS, DTYPES, activations_name, cache_name, weights_name
from kvloom.planning.memory import size_bytes, size_text

HEADROOM_SHARE = 0.1
"""Share of the free memory that an automatic block pool leaves free."""

LEAST_HEADROOM = 192 * 2**20
"""Bytes that it leaves free at least. With the default model the tokenizer, its imports and memory kept by the
allocator need 55 to 75 MiB of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """The memory plan of one server. Sizes are in bytes.

    Attributes:
        free: free memory before anything is loaded; on a GPU, the GPU's.
        host_free: free host memory for the swap pool; None if it is the same memory.
        weights: the loaded weights.
        products: products compiled at run time; on a GPU, the memory of CUDA graphs.
        step: the tensors of a step at their peak, and the threads' scratch memory.
        headroom: memory that an automatic block pool leaves free.
        weights_dtype: the form of the weights: fp32, bf16, int8, int4 or w8a8.
        kv_dtype: name of the cache's dtype.
        block_size: tokens per block.
        block_bytes: size of a block.
        blocks: number of blocks in the pool.
        swap_blocks: number of blocks in host memory, for swapped sequences.
        retain_blocks: maximum number of blocks that may be retained.
        context_length: longest sequence in tokens.
        max_running: maximum number of sequences in a step.
    """

    free: int
    host_free: int | None
    weights: int
    products: int
    step: int
    headroom: int
    weights_dtype: str
    kv_dtype: str
    block_size: int
    block_bytes: int
    blocks: int
    swap_blocks: int
    retain_blocks: int
    context_length: int
    max_running: int

    @property
    def token_bytes(self) -> float:
        """Bytes per token in a full block."""
        return self.block_bytes / self.block_size

    @property
    def pool(self) -> int:
        """Bytes of the block pool."""
        return self.blocks * self.block_bytes

    @property
    def swap(self) -> int:
        """Bytes of the swap pool."""
        return self.swap_blocks * self.block_bytes

    @property
    def left(self) -> int:
        """Unplanned free bytes, including the headroom. Negative if the settings ask for too large a pool."""
        swap = self.swap if self.host_free is None else 0
        return self.free - self.weights - self.products - self.step - self.pool - swap

    def sequences(self, length: int) -> int:
        """How many sequences of ``length`` tokens, prompt and answer together, fit into the pool at once."""
        return self.blocks // blocks_for(length, self.block_size)


def plan_memory(spec: ModelSpec, settings: Settings, free: int, host_free: int | None = None) -> MemoryPlan:
    """Plan a server's memory.

    Args:
        spec: the model's shape.
        settings: the server's settings, with the device chosen.
        free: free bytes on the model's device before anything is loaded.
        host_free: free bytes of host memory; None if it is the same memory.

    Raises:
        SettingsError: a setting does not fit the model or the memory. The message says what to do.
    """
    context = settings.context_length or spec.context_length
    if context > spec.context_length:
        raise SettingsError(f"setting context_length={context}: the model was made for {spec.context_length} tokens")
    # No position beyond it is ever computed
    spec = replace(spec, context_length=context)
    dtype, codec = DTYPES[activations_name(settings)], CODECS[cache_name(settings)]
    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, settings.block_size)
    block_bytes = codec.block_bytes(geometry)
    # Each running sequence computes at least one token in every step
    max_running = min(settings.max_running, settings.max_batch_tokens)
    on_gpu = settings.device.startswith("cuda")
    sizes = gpu_footprint if on_gpu else footprint
    scratch = 0 if on_gpu else footprint.scratch_bytes(spec, settings.step_threads)
    kind = weights_name(settings)
    weights = sizes.weights_bytes(spec, kind, dtype)
    products = sizes.products_bytes(spec, kind, dtype, settings.max_batch_tokens, max_running)
    headroom = max(int(free * HEADROOM_SHARE), LEAST_HEADROOM)
    swap_blocks = size_bytes(settings.swap_memory) // block_bytes
    swap = swap_blocks * block_bytes
    swap_here = swap if host_free is None else 0
    if host_free is not None and swap > host_free:
        raise SettingsError(
            f"setting swap_memory={settings.swap_memory!r}: only {size_text(host_free)} of host memory is free; "
            "lower it (0 is off)"
        )

    def step(blocks: int) -> int:
        # A sequence can't be longer than the pool
        longest = min(context, blocks * settings.block_size)
        tokens = settings.max_batch_tokens
        return scratch + sizes.step_bytes(spec, kind, dtype, codec.dtype.itemsize, tokens, max_running, longest)

    if settings.kv_blocks or settings.kv_memory != "auto":
        blocks = _chosen_blocks(settings, free, block_bytes)
        _check_swap(settings, free - blocks * block_bytes, swap_here)
    else:
        max_blocks = max_running * blocks_for(context, settings.block_size)
        room = free - weights - products - headroom - swap_here
        blocks = bisect_right(range(max_blocks + 1), room, key=lambda n: n * block_bytes + step(n)) - 1
        if blocks < 1:
            raise SettingsError(
                f"setting kv_memory='auto': no block of {size_text(block_bytes)} fits. Of {size_text(free)} free, "
                f"weights take {size_text(weights)}, compiled products {size_text(products)}, "
                f"a step {size_text(step(1))}, swap_memory {size_text(swap_here)}, headroom {size_text(headroom)}: "
                "free memory, lower swap_memory, max_batch_tokens or max_running, "
                "or choose the size with kv_memory"
            )
    return MemoryPlan(
        free=free,
        host_free=host_free,
        weights=weights,
        products=products,
        step=step(blocks),
        headroom=headroom,
        weights_dtype=kind,
        kv_dtype=cache_name(settings),
        block_size=settings.block_size,
        block_bytes=block_bytes,
        blocks=blocks,
        swap_blocks=swap_blocks,
        retain_blocks=_retain_blocks(settings, block_bytes, blocks),
        context_length=context,
        max_running=max_running,
    )


def _chosen_blocks(settings: Settings, free: int, block_bytes: int) -> int:
    """The number of blocks if the settings give the pool's size."""
    if settings.kv_blocks:
        name, size = f"kv_blocks={settings.kv_blocks}", settings.kv_blocks * block_bytes
    else:
        text = settings.kv_memory
        name = f"kv_memory={text!r}"
        size = int(float(text[:-1]) / 100 * free) if text.endswith("%") else size_bytes(text)
    if size > free:
        raise SettingsError(f"setting {name}: takes {size_text(size)}, but only {size_text(free)} is free; lower it")
    if size < block_bytes:
        raise SettingsError(f"setting {name}: is {size_text(size)}, but one block takes {size_text(block_bytes)}")
    return size // block_bytes


def _check_swap(settings: Settings, free: int, size: int) -> None:
    if size > free:
        raise SettingsError(
            f"setting swap_memory={settings.swap_memory!r}: only {size_text(free)} is free beside the block pool; "
            "lower it (0 is off), kv_memory or kv_blocks"
        )


def _retain_blocks(settings: Settings, block_bytes: int, blocks: int) -> int:
    """The most blocks that may be retained. Some of the pool must be left for other requests."""
    retained = size_bytes(settings.retain_memory) // block_bytes
    if retained >= blocks:
        raise SettingsError(
            f"setting retain_memory={settings.retain_memory!r}: leaves nothing of the block pool of "
            f"{size_text(blocks * block_bytes)}; lower it or raise kv_memory"
        )
    return retained
