"""The memory planner: what weights, cache and a step take, and how many sequences fit into what is free."""

from bisect import bisect_right
from dataclasses import dataclass

from kvloom.config import Settings
from kvloom.errors import SettingsError
from kvloom.kv.blocks import blocks_for
from kvloom.kv.codec import BlockGeometry
from kvloom.models import footprint, gpu_footprint
from kvloom.models.spec import ModelSpec
from kvloom.planning.dtypes import CODECS, DTYPES, activations_name, cache_name, weights_name
from kvloom.planning.memory import size_bytes, size_text

HEADROOM_SHARE = 0.1
"""Share of the free memory that an automatic pool leaves alone."""

LEAST_HEADROOM = 192 * 2**20
"""Bytes it leaves alone at least: with the default model the tokenizer, the imports that it brings and what the
allocator keeps come to 55 to 75 MiB."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Where the memory of one server goes. Sizes are in bytes.

    Attributes:
        free: what the process can take before anything is loaded; on a GPU, of the GPU's memory.
        host_free: what it can take of the host's memory, where that is another: for the swap pool.
        weights: loaded weights, as they are kept.
        products: what the compiled products take; on a GPU, what CUDA graphs keep.
        step: a step's tensors at their peak, and what threads keep from step to step.
        headroom: what an automatic pool leaves alone.
        weights_dtype: what the weights are: fp32, bf16, int8, int4 or w8a8.
        kv_dtype: name of the cache's dtype.
        block_size: tokens in a block.
        block_bytes: size of a block.
        blocks: blocks of the pool.
        swap_blocks: blocks in host memory for sequences that are swapped out.
        retain_blocks: maximum number of blocks of the pool that may be kept for prompts which ask for it.
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
        """Bytes that a token takes in a full block."""
        return self.block_bytes / self.block_size

    @property
    def pool(self) -> int:
        """Bytes of the pool."""
        return self.blocks * self.block_bytes

    @property
    def swap(self) -> int:
        """Bytes of the swap pool."""
        return self.swap_blocks * self.block_bytes

    @property
    def left(self) -> int:
        """Free bytes that nothing is planned for, headroom included; below 0 where a chosen pool is too large."""
        swap = self.swap if self.host_free is None else 0
        return self.free - self.weights - self.products - self.step - self.pool - swap

    def sequences(self, length: int) -> int:
        """How many sequences of ``length`` tokens, answer included, the pool holds at once."""
        return self.blocks // blocks_for(length, self.block_size)


def plan_memory(spec: ModelSpec, settings: Settings, free: int, host_free: int | None = None) -> MemoryPlan:
    """Plan a server's memory.

    Args:
        spec: the model's shape.
        settings: the server's settings, the device being chosen.
        free: bytes that the process can take where the model runs, nothing being loaded yet.
        host_free: bytes that it can take of the host's memory; None where that is the same memory.

    Raises:
        SettingsError: a setting does not fit the model or the memory; says what to do.
    """
    context = settings.context_length or spec.context_length
    if context > spec.context_length:
        raise SettingsError(f"setting context_length={context}: the model was made for {spec.context_length} tokens")
    dtype, codec = DTYPES[activations_name(settings)], CODECS[cache_name(settings)]
    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, settings.block_size)
    block_bytes = codec.block_bytes(geometry)
    # each running sequence computes at least one token in every step
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
        # no sequence outgrows the pool
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
                f"setting kv_memory='auto': not one block of {size_text(block_bytes)} fits. Of {size_text(free)} free, "
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
    """Blocks of a pool whose size is set."""
    if settings.kv_blocks:
        name, size = f"kv_blocks={settings.kv_blocks}", settings.kv_blocks * block_bytes
    else:
        text = settings.kv_memory
        name = f"kv_memory={text!r}"
        size = int(float(text[:-1]) / 100 * free) if text.endswith("%") else size_bytes(text)
    if size > free:
        raise SettingsError(f"setting {name}: takes {size_text(size)}, only {size_text(free)} is free")
    if size < block_bytes:
        raise SettingsError(f"setting {name}: takes {size_text(size)}, one block takes {size_text(block_bytes)}")
    return size // block_bytes


def _check_swap(settings: Settings, free: int, size: int) -> None:
    if size > free:
        raise SettingsError(
            f"setting swap_memory={settings.swap_memory!r}: only {size_text(free)} is free beside the block pool; "
            "lower it (0 is off), kv_memory or kv_blocks"
        )


def _retain_blocks(settings: Settings, block_bytes: int, blocks: int) -> int:
    """Most blocks that may be retained: some of the pool must be left for everyone else."""
    retained = size_bytes(settings.retain_memory) // block_bytes
    if retained >= blocks:
        raise SettingsError(
            f"setting retain_memory={settings.retain_memory!r}: is the whole block pool of "
            f"{size_text(blocks * block_bytes)}; lower it or raise kv_memory"
        )
    return retained
