"""Measures the machine's current memory bandwidth and product rates.

The speed of a cloud machine changes from minute to minute, because neighbours share its memory and its clock. So it is
measured repeatedly during a benchmark, each time within a second, and every figure is compared with its own floor.
"""

import json
import mmap
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

import torch

from bench.floors import Machine

READ_BYTES = 2**29
"""Many times the size of the caches."""

SIDE = 2048
"""Rows and columns of the matrices, which are so large that the caches' sizes do not matter."""

ROW = 2**15
"""Numbers in a row when the memory is read as a matrix."""

UNSTEADY = 0.15
"""A quiet machine's rates change less than this share."""


class Probe:
    """A separate process that measures on request. A context manager that ends it.

    It is separate because OpenMP keeps worker threads in a process, which would compete with the engines for cores.
    """

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.probe"],
            cwd=Path(__file__).parents[1],  # where Python finds bench
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def measure(self, repeats: int) -> Machine:
        """Measure each rate ``repeats`` times and return the best. Five repetitions take about a second."""
        assert self._process.stdin is not None and self._process.stdout is not None
        print(repeats, file=self._process.stdin, flush=True)
        return Machine(**json.loads(self._process.stdout.readline()))

    def __enter__(self) -> "Probe":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()


def best(machines: Sequence[Machine]) -> Machine:
    """The best of each rate."""
    return _each(max, machines)


def median(machines: Sequence[Machine]) -> Machine:
    """The median of each rate."""
    return _each(statistics.median, machines)


def _each(of: Callable[[Iterable[float]], float], machines: Sequence[Machine]) -> Machine:
    names = machines[0].operations
    return Machine(
        bytes_per_s=of([machine.bytes_per_s for machine in machines]),
        operations={name: of([machine.operations[name] for machine in machines]) for name in names},
    )


def spread(machines: Sequence[Machine]) -> dict[str, list[float]]:
    """Minimum, median and maximum of each rate in 10^9 per second. ``memory`` is the bytes read from memory."""
    rates = {"memory": [machine.bytes_per_s for machine in machines]}
    rates |= {name: [machine.operations[name] for machine in machines] for name in machines[0].operations}
    return {
        name: [round(rate / 1e9, 1) for rate in (min(of), statistics.median(of), max(of))] for name, of in rates.items()
    }


def unsteady(machines: Sequence[Machine]) -> list[str]:
    """The rates that changed by more than ``UNSTEADY``, so that figures of different times are not comparable."""
    return [
        f"{name}: {least:,.1f} to {most:,.1f} (10^9/s)"
        for name, (least, _, most) in spread(machines).items()
        if most - least > UNSTEADY * most
    ]


def _rates() -> dict[str, tuple[float, list[Callable[[], object]]]]:
    """For each rate, the amount of work and several ways to do it. The fastest way counts."""
    # Huge pages, which fast engines use for their weights
    pages = mmap.mmap(-1, READ_BYTES)
    pages.madvise(mmap.MADV_HUGEPAGE)
    numbers = torch.frombuffer(pages, dtype=torch.float32)
    # All pages differ, because a virtual machine's host may store equal pages only once
    torch.arange(len(numbers), out=numbers)
    # Which of these reads fastest depends on the machine
    by_rows = partial(torch.mv, numbers.view(-1, ROW), torch.ones(ROW))
    reads: list[Callable[[], object]] = [numbers.sum, numbers.max, by_rows]
    rates: dict[str, tuple[float, list[Callable[[], object]]]] = {"memory": (READ_BYTES, reads)}
    operations = 2 * SIDE**3
    plain = partial(torch.mm, *torch.randn(2, SIDE, SIDE).unbind())
    rates["fp32"] = (operations, [plain])
    for name, dtype, multiply in (("bf16", torch.bfloat16, torch.mm), ("int8", torch.int8, torch._int_mm)):
        left, right = torch.randint(-127, 128, (2, SIDE, SIDE)).to(dtype).unbind()
        rates[name] = (operations, [partial(multiply, left, right) if _is_fast(multiply, dtype) else plain])
    return rates


def _is_fast(multiply: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype) -> bool:
    """Whether torch has a fast product for this dtype on this CPU, and not a loop that is a hundred times slower.

    Without a fast product (no AVX-512) the rate of fp32 is used.
    """

    def seconds(multiply: Callable[[torch.Tensor, torch.Tensor], object], dtype: torch.dtype) -> float:
        left, right = torch.ones(2, 256, 256, dtype=dtype).unbind()
        taken = []
        for _ in range(3):
            begin = time.perf_counter()
            multiply(left, right)
            taken.append(time.perf_counter() - begin)
        return min(taken)

    return seconds(multiply, dtype) < 10 * seconds(torch.mm, torch.float32)


def _serve() -> None:
    """Measure for every number of repetitions that is read from stdin."""
    rates = _rates()
    for line in sys.stdin:
        seconds: dict[str, list[float]] = {name: [] for name in rates}
        for _ in range(int(line)):
            # In turns, so that a short disturbance affects only one repetition of each
            for name, (_, ways) in rates.items():
                for what in ways:
                    begin = time.perf_counter()
                    what()
                    seconds[name].append(time.perf_counter() - begin)
        measured = {name: amount / min(seconds[name]) for name, (amount, _) in rates.items()}
        machine = Machine(bytes_per_s=measured.pop("memory"), operations=measured)
        print(json.dumps(asdict(machine)), flush=True)


if __name__ == "__main__":
    _serve()
