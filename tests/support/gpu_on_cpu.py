"""The GPU's runner on a CPU. Replaying a graph calls the function that would have been recorded."""

from collections.abc import Callable

import torch

from kvloom.executor.decode_steps import DecodeSteps
from kvloom.executor.gpu_runner import GpuRunner
from kvloom.executor.gpu_step import GpuStep
from kvloom.executor.runner import Runner
from kvloom.kv.storage import Storage
from kvloom.models.decoder import Decoder


class Recorder:
    """Replaces ``CudaRecorder`` and counts replays."""

    def __init__(self) -> None:
        self.replays = 0

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        work()

        def replay() -> None:
            self.replays += 1
            work()

        return replay


def runner_factory(
    tokens: int, sequences: int, context_length: int, record: Recorder | None
) -> Callable[[Decoder, Storage, Storage, int, DecodeSteps], Runner]:
    """A replacement for ``Runner`` in ``build_engine``. Without a recorder every step is eager."""

    def make(decoder: Decoder, storage: Storage, host: Storage, block_size: int, _: DecodeSteps) -> Runner:
        step = GpuStep(decoder, storage.layers, tokens, sequences, context_length, torch.device("cpu"))
        if record is not None:
            step.record_graphs(record)
        return GpuRunner(decoder, storage, host, block_size, step)

    return make
