"""Runs the cases: round by round, each group by every engine in turn, so that a noisy machine hits all alike."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from rich.progress import Progress, TaskID

from bench.cases import Group, Run, Scale, rounds
from bench.drivers import Driver, EngineFailed
from bench.peers import Environment
from bench.prompts import PromptSource
from bench.record import Record
from bench.variants import Variant

WARM_UP_NEW = 4


class Measurement:
    """One benchmark.

    Args:
        scale: of the cases.
        count: of the rounds.
        record: where it goes; what it has already is not measured again.
        source: of the prompts.
        progress: shows where it is.
    """

    def __init__(self, scale: Scale, count: int, record: Record, source: PromptSource, progress: Progress):
        streams, length = min(8, max(scale.streams)), scale.prefills[0]
        # buffers, threads and kernels come with the first use
        self._warm_up = [
            Run("warm-up", "all", source.take(streams, scale.prompt), WARM_UP_NEW),
            Run("warm-up", "prefill", source.take(1, length), 1),
        ]
        self._rounds = list(rounds(scale, count, source))
        self._record = record
        self._progress = progress

    def run(self, variants: Sequence[Variant], in_turns: bool) -> None:
        """Measure. ``in_turns``: one engine at a time is in memory, loaded anew in each round."""
        runs = sum(
            len(list(wanted(variant, group))) for groups in self._rounds for group in groups for variant in variants
        )
        task = self._progress.add_task("benchmark", total=runs)
        numbers = range(len(self._rounds))
        if in_turns:
            for number in numbers:
                for variant in variants:
                    with self._loaded([variant], [number]) as drivers:
                        self._round(number, drivers, task)
        else:
            with self._loaded(variants, numbers) as drivers:
                for number in numbers:
                    self._round(number, drivers, task)

    @contextmanager
    def _loaded(self, variants: Sequence[Variant], numbers: Sequence[int]) -> Iterator[list[Driver]]:
        """Drivers of those variants that are there and have something to do in these rounds."""
        drivers: list[Driver] = []
        with ExitStack() as stack:
            for variant in variants:
                if not any(self._left(variant, number, group) for number in numbers for group in self._rounds[number]):
                    continue
                absence = Environment(variant.environment).absence()
                if absence is not None:
                    self._record.without(variant.name, absence)
                    continue
                self._progress.console.print(f"loading {variant.name}")
                try:
                    driver = stack.enter_context(Driver(variant))
                    for run in self._warm_up:
                        driver.run(run)
                except EngineFailed as error:
                    self._record.without(variant.name, str(error))
                    continue
                self._record.loaded(variant.name, driver.versions)
                drivers.append(driver)
            yield drivers
            for driver in drivers:
                self._record.memory(driver.variant.name, driver.peak_rss())

    def _round(self, number: int, drivers: list[Driver], task: TaskID) -> None:
        for place, group in enumerate(self._rounds[number]):
            # nobody is always behind the same one
            shift = (number + place) % max(1, len(drivers))
            for driver in drivers[shift:] + drivers[:shift]:
                if self._left(driver.variant, number, group):
                    self._group(number, group, driver, drivers)
                self._progress.advance(task, len(list(wanted(driver.variant, group))))

    def _group(self, number: int, group: Group, driver: Driver, drivers: list[Driver]) -> None:
        name = driver.variant.name
        for run in wanted(driver.variant, group):
            try:
                seconds, tokens = driver.run(run)
            except EngineFailed as error:
                self._record.without(name, f"{run.name}: {error}")
                drivers.remove(driver)
                return
            self._record.run(name, number, run.name, seconds, [answer[0] for answer in tokens])

    def _left(self, variant: Variant, number: int, group: Group) -> bool:
        done = self._record.seconds[variant.name][number]
        return any(run.name not in done for run in wanted(variant, group))


def wanted(variant: Variant, group: Group) -> Iterator[Run]:
    """The runs of the group that are measured with the variant."""
    if group.streams <= variant.most_streams:
        yield from (run for run in group.runs if run.kind not in variant.skips)
