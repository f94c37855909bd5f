"""Runs the cases. In each round all engines do each group one after the other, so that noise affects all equally.

The speed of a shared machine changes by a third within minutes. Figures of two engines are comparable if both did the
case within seconds of each other. So as many engines as fit are in memory at once and stopped while they wait, and
engines that are compared are neighbours in the list. What fits depends on the available memory before each round and on
the maximum memory of each engine; the next engines are loaded when the previous ones have ended. Every round loads them
again, because the placement of pages and threads at the start is random and the median should include it.
"""

import statistics
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

import psutil
from rich.console import Console

from bench.cases import Group, Run, Scale, rounds
from bench.drivers import Driver, EngineFailed
from bench.peers import Environment
from bench.probe import Probe
from bench.prompts import PromptSource
from bench.record import Record
from bench.variants import Variant, together

WARM_UP_NEW = 4

GIB = 2**30
SHARE = 0.9
"""Share of the available memory that engines may use."""

RESERVE = GIB
"""The benchmark stops if less memory is available."""

LOAD_S = 12.0
"""Approximate seconds to load an engine and to end it."""


class MemoryShortError(Exception):
    """The engines or other programs use more memory than expected. The message says what to do."""


def memory_for_engines() -> float:
    """The memory that engines may use, in GiB."""
    return SHARE * psutil.virtual_memory().available / GIB


class Measurement:
    """One benchmark.

    Args:
        scale: the size of the cases.
        count: the number of rounds.
        record: receives the samples. Samples that it already has are not measured again.
        source: the source of prompts.
        console: for progress lines.
        memory_gib: the memory that engines may use; None for most of the available memory.
    """

    def __init__(
        self,
        scale: Scale,
        count: int,
        record: Record,
        source: PromptSource,
        console: Console,
        memory_gib: float | None = None,
    ):
        streams, length = min(8, max(scale.streams)), scale.prefills[0]
        # The first use allocates buffers and creates threads and kernels
        self._warm_up = [
            Run("warm-up", "all", source.take(streams, scale.prompt), WARM_UP_NEW),
            Run("warm-up", "prefill", source.take(1, length), 1),
        ]
        self._rounds = list(rounds(scale, count, source))
        self._scale = scale
        self._record = record
        self._console = console
        self._memory_gib = memory_gib

    def run(self, variants: Sequence[Variant]) -> None:
        """Measure these variants.

        Raises:
            MemoryShortError: less than 1 GiB of memory is available.
        """
        for variant in variants:
            absence = Environment(variant.environment).absence()
            if absence is not None:
                self._record.without(variant.name, absence)
        there = [variant for variant in variants if Environment(variant.environment).absence() is None]
        with Probe() as probe:
            # So that the probe has allocated its memory
            probe.measure(1)
            for number in range(len(self._rounds)):
                wanting = [variant for variant in there if self._missing(variant, number)]
                room = memory_for_engines() if self._memory_gib is None else self._memory_gib
                parts = together(wanting, room)
                for variant in wanting:
                    if not any(variant in part for part in parts):
                        why = f"it may need {variant.memory_gib:.1f} GiB of memory, but engines may use {room:.1f} GiB"
                        self._record.without(variant.name, why)
                for part in parts:
                    with self._loaded(part) as drivers:
                        self._round(number, drivers, probe, there)

    @contextmanager
    def _loaded(self, variants: Sequence[Variant]) -> Iterator[list[Driver]]:
        """The drivers of the variants that could be loaded."""
        drivers: list[Driver] = []
        with ExitStack() as stack:
            for variant in variants:
                self._console.print(f"loading {variant.name}", highlight=False)
                try:
                    driver = stack.enter_context(Driver(variant, self._scale.settled))
                    rss = driver.rss()
                    for run in self._warm_up:
                        driver.run(run)
                except EngineFailed as error:
                    self._record.without(variant.name, str(error))
                    continue
                self._record.loaded(variant.name, driver.versions, driver.load_seconds, rss)
                drivers.append(driver)
            yield drivers

    def _round(self, number: int, drivers: list[Driver], probe: Probe, all_of_them: Sequence[Variant]) -> None:
        before = probe.measure(self._scale.probes)
        for place, group in enumerate(self._rounds[number]):
            wanting = [driver for driver in drivers if self._left(driver.variant, number, group)]
            if not wanting:
                continue
            self._say(number, group, len(wanting), all_of_them)
            # So that no engine always runs after the same other one
            shift = (number + place) % len(wanting)
            for driver in wanting[shift:] + wanting[:shift]:
                self._group(number, group, driver, drivers)
                _spare_memory()
            after = probe.measure(self._scale.probes)
            names = [driver.variant.name for driver in wanting]
            self._record.machine(names, number, group.name, [before, after])
            before = after

    def _group(self, number: int, group: Group, driver: Driver, drivers: list[Driver]) -> None:
        name = driver.variant.name
        for run in self._left(driver.variant, number, group):
            try:
                seconds, tokens = driver.run(run)
            except EngineFailed as error:
                self._record.without(name, f"{run.name}: {error}")
                drivers.remove(driver)
                return
            self._record.run(name, number, run.name, seconds, [answer[0] for answer in tokens])
        self._record.memory(name, driver.peak_rss())

    def _left(self, variant: Variant, number: int, group: Group) -> list[Run]:
        """The runs of the group to measure: none if all have samples, otherwise all."""
        runs = list(wanted(variant, group))
        done = self._record.seconds[variant.name][number]
        return runs if sum(len(done.get(name, ())) for name in {run.name for run in runs}) < len(runs) else []

    def _missing(self, variant: Variant, number: int) -> list[Run]:
        return [run for group in self._rounds[number] for run in self._left(variant, number, group)]

    def _say(self, number: int, group: Group, engines: int, variants: Sequence[Variant]) -> None:
        minutes = self._seconds_left(number, variants) / 60
        line = (
            f"round {number + 1} of {len(self._rounds)}, {engines} engines, {group.name}: about {minutes:.0f} min left"
        )
        self._console.print(line, highlight=False)

    def _seconds_left(self, number: int, variants: Sequence[Variant]) -> float:
        there = [variant for variant in variants if variant.name not in self._record.absent]
        later = sum(LOAD_S for other in range(number + 1, len(self._rounds)) for v in there if self._missing(v, other))
        loading = sum(LOAD_S for variant in there if self._missing(variant, number) == self._all(variant, number))
        runs = [(v, run) for other in range(len(self._rounds)) for v in there for run in self._missing(v, other)]
        return later + loading + sum(self._expected(variant, run) for variant, run in runs)

    def _all(self, variant: Variant, number: int) -> list[Run]:
        return [run for group in self._rounds[number] for run in wanted(variant, group)]

    def _expected(self, variant: Variant, run: Run) -> float:
        """The expected seconds of a run: the median of earlier rounds, or an estimate."""
        before = [s for samples in self._record.seconds[variant.name].values() for s in samples.get(run.name, ())]
        if before:
            return statistics.median(before)
        prompts = len(run.prompts)
        computed = 1 if run.kind == "shared" else prompts
        return computed * len(run.prompts[0]) / 1200 + (run.new - 1) * (0.012 + 0.001 * prompts)


def wanted(variant: Variant, group: Group) -> Iterator[Run]:
    """The runs of the group that are measured with the variant."""
    if group.streams <= variant.max_streams:
        yield from (run for run in group.runs if run.kind not in variant.skips)


def _spare_memory() -> None:
    available = psutil.virtual_memory().available
    if available < RESERVE:
        raise MemoryShortError(
            f"only {available / GIB:.1f} GiB of memory are left; continue with --resume and fewer engines at once: "
            "give a smaller --memory GIB"
        )
