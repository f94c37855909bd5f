"""Timing: graph replays between events on a GPU, or the wall clock in a dry run on a CPU."""

import statistics
import time
from collections.abc import Callable, Sequence

import torch

Work = Callable[[], object]


class Clock:
    """Times work on a device.

    Args:
        device: a GPU, or the CPU for a dry run, whose times are meaningless.
        repeats: number of repetitions. The median counts.
    """

    def __init__(self, device: torch.device, repeats: int):
        self._device = device
        self._repeats = repeats

    def seconds(self, works: Sequence[Work]) -> float:
        """The time of one of ``works``, which do the same with different inputs, so that no input is in a cache.

        They are recorded into one graph and replayed, so the time does not include the host.
        """
        if self._device.type != "cuda":
            return self._by_wall(works) / len(works)
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for work in works:
                work()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for work in works:
                work()
        graph.replay()
        return self.launched_seconds(graph.replay) / len(works)

    def launched_seconds(self, work: Work) -> float:
        """The time on the device of the kernels that ``work`` launches, without a graph."""
        if self._device.type != "cuda":
            return self._by_wall([work])
        times = []
        for _ in range(self._repeats):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            work()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) / 1e3)
        return statistics.median(times)

    def waited_seconds(self, work: Work) -> float:
        """The time on the host from the call to its end, including the device's work."""
        self._wait()
        times = []
        for _ in range(self._repeats):
            start = time.perf_counter()
            work()
            self._wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def _by_wall(self, works: Sequence[Work]) -> float:
        start = time.perf_counter()
        for work in works:
            work()
        return time.perf_counter() - start

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()


def copy_bandwidth(clock: Clock, device: torch.device, size: int) -> float:
    """Bytes per second, read and written, of a copy of ``size`` bytes within the device's memory."""
    source = torch.randint(255, (size,), dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / clock.seconds([lambda: target.copy_(source)])
