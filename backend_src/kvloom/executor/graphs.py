"""Decode steps recorded once as CUDA graphs and replayed: hundreds of launches become one."""

import bisect
from collections.abc import Callable, Sequence
from functools import partial

import torch

Replay = Callable[[], object]
Record = Callable[[Callable[[], None]], Replay]
"""Runs work once, recording what it launches, and returns what launches all of that again."""


def graph_sizes(max_sequences: int) -> list[int]:
    """Numbers of sequences that a graph is recorded for: 1, 2, 4, 8, then every 16, and ``max_sequences`` itself."""
    return [size for size in (1, 2, 4, 8) if size < max_sequences] + [*range(16, max_sequences, 16), max_sequences]


class CudaRecorder:
    """Records CUDA graphs that share one pool of memory: they never run at the same time.

    Whatever a graph's work allocates belongs to the pool, at addresses that stay. What others read after a replay must
    lie outside it.
    """

    def __init__(self) -> None:
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Callable[[], None]) -> Replay:
        """See ``Record``. The work must have run before: nothing may be compiled or chosen while it is recorded."""
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            work()
        return graph.replay


class DecodeGraphs:
    """A graph for each padded number of sequences.

    Args:
        sizes: numbers of sequences, rising.
        compute: computes a decode step of so many sequences on static buffers.
        record: records it.
    """

    def __init__(self, sizes: Sequence[int], compute: Callable[[int], None], record: Record):
        self._sizes = list(sizes)
        # the largest first: the others find room in what it left in the pool
        self._replays = {size: record(partial(compute, size)) for size in reversed(self._sizes)}

    def padded(self, count: int) -> int | None:
        """The number of sequences that ``count`` are padded to; None where no graph is large enough."""
        place = bisect.bisect_left(self._sizes, count)
        return self._sizes[place] if place < len(self._sizes) else None

    def replay(self, size: int) -> None:
        """Launch the graph of ``size`` sequences; the buffers are filled."""
        self._replays[size]()
