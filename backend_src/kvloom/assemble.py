"""From settings to an engine that is ready to serve."""

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from kvloom.config import Settings
from kvloom.engine import Engine, Limits
from kvloom.errors import SettingsError
from kvloom.fetch import cache_folder, default_model
from kvloom.kv.blocks import BlockPool
from kvloom.kv.cache import BlockCache
from kvloom.kv.codec import BlockGeometry, PlainCodec
from kvloom.kv.storage import Storage
from kvloom.measure import measure_costs
from kvloom.models.decoder import Decoder
from kvloom.models.weights import open_model
from kvloom.ops import native
from kvloom.plan import memory_bytes, pool_blocks
from kvloom.runner import Runner
from kvloom.scheduler import Scheduler
from kvloom.tokenizer import Tokenizer

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class Assembly:
    """An engine, the tokenizer of its model, and what the engine takes."""

    engine: Engine
    tokenizer: Tokenizer
    limits: Limits


def assemble(settings: Settings) -> Assembly:
    """Load the model and build everything around it.

    Raises:
        SettingsError: a setting does not fit the model or the machine.
        ModelError: the model can't be loaded.
    """
    torch.set_num_threads(settings.threads or os.cpu_count() or 1)
    native.use(cache_folder("ops"))
    files = open_model(default_model() if settings.model == "default" else Path(settings.model))
    spec = files.spec
    context = settings.context_length or spec.context_length
    if context > spec.context_length:
        raise SettingsError(f"setting context_length={context}: the model was made for {spec.context_length} tokens")
    dtype = _weights_dtype(settings.weights)
    kv_dtype = dtype if settings.kv_dtype == "auto" else _DTYPES[settings.kv_dtype]

    codec = PlainCodec(kv_dtype)
    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, settings.block_size)
    most = settings.max_running * -(-context // settings.block_size)
    block_bytes = codec.block_bytes(geometry)
    blocks = settings.kv_blocks or pool_blocks(settings.kv_memory, block_bytes, most)
    host_blocks = memory_bytes(settings.swap_memory, 0) // block_bytes
    retain_limit = min(blocks, memory_bytes(settings.retain_memory, 0) // block_bytes)

    decoder = Decoder(spec, files.load(dtype), dtype)
    device = torch.device("cpu")
    storage = Storage(codec, geometry, blocks, device)
    host_storage = Storage(codec, geometry, host_blocks, device)
    runner = Runner(decoder, storage, host_storage, settings.block_size)
    cache = BlockCache(blocks, settings.block_size, settings.prefix_cache, retain_limit, settings.test_block_hash)
    host = BlockPool(host_blocks)
    costs = measure_costs(decoder, storage, host_storage, settings.block_size)
    scheduler = Scheduler(cache, host, costs, settings.max_running, settings.max_batch_tokens)
    kv_name = next(name for name, dtype in _DTYPES.items() if dtype == kv_dtype)
    limits = Limits(
        context_length=context,
        vocab_size=spec.vocab_size,
        max_queue=settings.max_queue,
        kv_dtype=kv_name,
        queue_timeout_s=settings.queue_timeout_ms / 1e3,
        fail_after_tokens=settings.test_fail_after_tokens,
    )
    tokenizer = Tokenizer.from_gguf(files.metadata) if files.kind == "gguf" else Tokenizer.from_folder(files.path)
    return Assembly(Engine(runner, scheduler, cache, host, tokenizer, limits), tokenizer, limits)


def _weights_dtype(weights: str) -> torch.dtype:
    """The dtype a ``weights`` setting stands for on this CPU."""
    if weights != "auto":
        return _DTYPES[weights]
    # oneDNN also emulates bf16 on older CPUs, slower than fp32: ask for the instructions, not for support
    native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return torch.bfloat16 if native else torch.float32
