"""Builds an engine from the settings."""

import sqlite3
from dataclasses import dataclass, replace

import torch

from kvloom.config import Settings
from kvloom.conversation.journal import Journal
from kvloom.conversation.manager import Triton
from kvloom.cores import usable_cores
from kvloom.engine.engine import Engine
from kvloom.engine.measure import measure_costs
from kvloom.errors import SettingsError
from kvloom.executor.decode_steps import DecodeSteps
from kvloom.executor.gpu_runner import GpuRunner
from kvloom.executor.runner import Runner
from kvloom.kv.blocks import BlockPool
from kvloom.kv.cache import BlockCache
from kvloom.kv.codec import BlockGeometry
from kvloom.kv.pages import PagesAhead
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Decoder
from kvloom.models.fetch import cache_folder, default_model
from kvloom.models.weight_conversion import converted_weights
from kvloom.models.weights import open_model
from kvloom.ops.native import use_native, use_torch
from kvloom.paths import path_of
from kvloom.planning.dtypes import CODECS, DTYPES, activations_name
from kvloom.planning.memory import give_back_freed
from kvloom.planning.placement import free_on, with_device
from kvloom.planning.plan import plan_memory
from kvloom.private import trusted_folder
from kvloom.progress import phase
from kvloom.scheduling.admission import EngineLimits
from kvloom.scheduling.scheduler import Scheduler
from kvloom.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine, its model's tokenizer and the engine's limits."""

    engine: Engine
    tokenizer: Tokenizer
    limits: EngineLimits


def build_engine(settings: Settings, triton: Triton | None = None, *, record: bool = True) -> BuiltEngine:
    """Load the model and build the engine with all its parts.

    Args:
        settings: the server's settings.
        triton: is told of conversations; None without Triton.
        record: whether decode steps on a CPU are recorded and replayed. False runs them op by op, for profiling.

    Raises:
        SettingsError: a setting does not fit the model or the machine.
        ModelError: the model can't be loaded.
    """
    settings = with_device(settings)
    device = torch.device(settings.device)
    on_gpu = device.type == "cuda"
    if on_gpu:
        torch.cuda.set_device(device)
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
    torch.set_num_threads(settings.step_threads)
    why = f"setting threads={settings.threads}" if settings.threads else usable_cores().why
    phase(f"CPU threads of a step: {settings.step_threads} ({why})")
    _use_native()
    phase(f"loading the model {settings.model}")
    files = open_model(default_model() if settings.model == "default" else path_of(settings.model))
    spec = files.spec
    free = free_on(device)
    plan = plan_memory(spec, settings, free.device, free.host)
    dtype, codec = DTYPES[activations_name(settings)], CODECS[plan.kv_dtype]
    if files.kind == "gguf":
        tokenizer = Tokenizer.from_gguf(files.metadata, settings.chat_special_tokens)
    else:
        tokenizer = Tokenizer.from_folder(files.path, settings.chat_special_tokens)

    geometry = BlockGeometry(spec.n_layers, spec.n_kv_heads, spec.head_dim, settings.block_size)
    weights = converted_weights(files, plan.weights_dtype, dtype, tokenizer, device)
    decoder = Decoder(replace(spec, context_length=plan.context_length), weights, dtype, device)
    storage = Storage(codec, geometry, plan.blocks, device)
    host_storage = Storage(codec, geometry, plan.swap_blocks, torch.device("cpu"), pinned=on_gpu)
    phase("warming up: measuring what computing and copying cost")
    # Measure before the thread that populates pages starts, since it would disturb the measurement
    costs = measure_costs(decoder, storage, host_storage, settings.block_size)
    # A pool set by the user may be larger than memory. It works until too many blocks are used, so don't populate it
    ahead = None if on_gpu or plan.left < 0 else PagesAhead(storage.memory, plan.block_bytes)
    cache = BlockCache(
        plan.blocks,
        settings.block_size,
        settings.prefix_cache,
        plan.retain_blocks,
        settings.test_block_hash,
        first_use=None if ahead is None else ahead.used,
    )
    host = BlockPool(plan.swap_blocks)
    if on_gpu:
        phase("compiling the GPU kernels and recording the decode steps")
        limits_of_step = settings.max_batch_tokens, plan.max_running, plan.context_length
        runner: Runner = GpuRunner.recorded(decoder, storage, host_storage, settings.block_size, *limits_of_step)
    else:
        decodes = DecodeSteps(decoder, storage.layers, plan.max_running, plan.context_length, record=record)
        runner = Runner(decoder, storage, host_storage, settings.block_size, decodes)
    scheduler = Scheduler(cache, host, costs, settings.max_running, settings.max_batch_tokens)
    limits = EngineLimits(
        context_length=plan.context_length,
        vocab_size=spec.vocab_size,
        max_queue=settings.max_queue,
        kv_dtype=plan.kv_dtype,
        queue_timeout_s=settings.queue_timeout_ms / 1e3,
        max_conversations=settings.max_conversations,
        conversation_idle_s=settings.conversation_idle_s,
        fail_after_tokens=settings.test_fail_after_tokens,
    )
    engine = Engine(
        runner, scheduler, cache, host, tokenizer, limits, triton, _journal(settings.journal_dir, tokenizer)
    )
    give_back_freed()
    return BuiltEngine(engine, tokenizer, limits)


def _use_native() -> None:
    try:
        cache = trusted_folder(cache_folder("ops"))
    except OSError as error:
        use_torch(f"{error} (set XDG_CACHE_HOME to a cache folder)")
    else:
        use_native(cache, building=phase)


def _journal(folder: str, tokenizer: Tokenizer) -> Journal | None:
    if not folder:
        return None
    try:
        return Journal(path_of(folder), tokenizer.identity)
    except (OSError, sqlite3.Error) as error:
        raise SettingsError(f"setting journal_dir={folder!r}: {error}") from error
