"""Records decode steps as CUDA graphs and replays them, so that hundreds of launches become one."""

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import torch

Replay = Callable[[], object]
Record = Callable[[Callable[[], None]], Replay]
"""Runs work once, records its launches and returns a function that launches all of them again."""


def graph_sizes(max_sequences: int) -> list[int]:
    """Numbers of sequences to record graphs for: 1, 2, 4, 8, then multiples of 16, and ``max_sequences`` itself."""
    return [size for size in (1, 2, 4, 8) if size < max_sequences] + [*range(16, max_sequences, 16), max_sequences]


class CudaRecorder:
    """Records CUDA graphs that share one memory pool. They must never run at the same time.

    Tensors allocated during recording are in the pool at fixed addresses, where other graphs overwrite them. A tensor
    that is read after a replay must be outside of the pool.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """See ``Record``. The work must have run before, since no kernel may be compiled or chosen while recording."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class DecodeGraphs:
    """One graph for each padded number of sequences.

    Args:
        sizes: numbers of sequences in ascending order.
        compute: computes a decode step of a given number of sequences on static buffers.
        record: records it.
    """

    def __init__(self, sizes: Sequence[int], compute: Callable[[int], None], record: Record):
        self._sizes = list(sizes)
        # The largest first: the others reuse its memory in the pool
        self._replays = {size: record(partial(compute, size)) for size in reversed(self._sizes)}

    def padded(self, count: int) -> int | None:
        """The number of sequences to which ``count`` is padded; None if no graph is large enough."""
        place = bisect.bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Launch the graph of ``size`` sequences. The buffers must be filled."""
        self._replays[size]()
