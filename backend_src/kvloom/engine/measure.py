"""Measures the costs of copying and computing on this machine when the engine starts."""

import time

import torch

from kvloom.executor.device import wait_for
from kvloom.executor.runner import build_batch
from kvloom.kv.blocks import blocks_for
from kvloom.kv.storage import Storage
from kvloom.kv.transfer import copy_blocks
from kvloom.models.decoder import Decoder
from kvloom.request import Request, SamplingParams, Sequence, Slice
from kvloom.scheduling.offloader import Costs

PREFILL_TOKENS = 128
"""Tokens of the measured prefill: enough to be compute-bound like a real prefill."""

COPY_BLOCKS = 16
"""Blocks of the measured copy."""

REPEATS = 3
"""The fastest of this many runs counts: the first one warms up, and other processes may disturb some."""


@torch.inference_mode()
def measure_costs(decoder: Decoder, storage: Storage, host: Storage, block_size: int) -> Costs:
    """Time a prefill and a copy to the host. Call it before serving, as it overwrites the first blocks of both.

    Returns:
        The costs. Without host blocks the cost of copying is meaningless, since nothing is copied.
    """
    tokens = min(PREFILL_TOKENS, len(storage.blocks) * block_size, decoder.spec.context_length)
    request = Request(id="measure", prompt_ids=(0,) * tokens, params=SamplingParams(), arrival=0.0)
    sequence = Sequence(request)
    sequence.blocks = list(range(blocks_for(tokens, block_size)))
    device = storage.memory.device
    batch = build_batch([Slice(sequence, 0, tokens)], block_size).to(device)
    blocks = min(COPY_BLOCKS, len(host.blocks), len(storage.blocks))
    moves = [(block, block) for block in range(blocks)]
    prefill_s = copy_s = float("inf")
    for _ in range(REPEATS):
        start = time.perf_counter()
        decoder.forward(batch, storage.layers)
        wait_for(device)
        middle = time.perf_counter()
        copy_blocks(storage, host, moves)
        wait_for(device)
        prefill_s = min(prefill_s, middle - start)
        copy_s = min(copy_s, time.perf_counter() - middle)
    return Costs(copy_block_s=copy_s / max(blocks, 1), compute_token_s=prefill_s / tokens)
