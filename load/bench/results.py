"""Computes the rows of bench.json from the record."""

import statistics
from collections.abc import Sequence
from typing import Any

from bench import probe
from bench.cases import Case, Scale, cases, figure
from bench.floors import PRECISIONS, Floors, Machine
from bench.record import Record
from bench.variants import Variant
from kvloom.models.spec import ModelSpec

Row = dict[str, Any]
SKIPPED = {"prefill": "prefill", "ttft_cold": "cold", "ttft_warm": "warm", "shared": "shared"}
"""The kind of run that each case needs."""

MIB = 2**20


def rows(variants: Sequence[Variant], record: Record, scale: Scale, rounds: int, spec: ModelSpec) -> list[Row]:
    """A row for every engine and case, and rows of each engine's memory; or one row with the reason why there are none.

    The figure of a case is the median over the rounds. Its share of the floor is the median of the rounds' shares, each
    with the floor of the machine's rates in that round.
    """
    made: list[Row] = []
    machine = probe.median(machines(record))
    for variant in variants:
        about = {"engine": variant.name, "precision": variant.precision}
        if variant.name in record.absent:
            made.append({**about, "absent": record.absent[variant.name]})
        usual = Floors(machine, spec, variant.precision)
        for case in cases(scale):
            row = _skipped(case, variant) or _figure(case, variant, record, scale, rounds, spec)
            if row is not None and "value" in row:
                row["floor"] = round(usual.of(case, scale), 1)
            made += [{**about, **_about(case), **row}] if row is not None else []
        made += [{**about, **row} for row in _memory(variant, record)]
        same = _same_first_tokens(record, variants[0].name, variant.name)
        if same is not None:
            made.append({**about, "case": "same_first_token", "size": None, "unit": "share", "value": round(same, 4)})
    return made


def machines(record: Record) -> list[Machine]:
    """The best rates before and after each group, once for all engines that did it."""
    by_engine = record.machines.values()
    found = [machine for numbers in by_engine for groups in numbers.values() for machine in groups.values()]
    return list({id(machine): machine for machine in found}.values())


def floor_rows(variants: Sequence[Variant], scale: Scale, machine: Machine, spec: ModelSpec) -> list[Row]:
    """The rows of the floors, for every precision of the variants."""
    precisions = [name for name in PRECISIONS if any(variant.precision == name for variant in variants)]
    return [
        {
            "engine": f"floor {precision}",
            "precision": precision,
            **_about(case),
            "value": round(Floors(machine, spec, precision).of(case, scale), 1),
        }
        for precision in precisions
        for case in cases(scale)
    ]


def seconds(variants: Sequence[Variant], record: Record) -> dict[str, dict[str, float]]:
    """The seconds of a round of each engine: to load it, and all its cases."""
    found: dict[str, dict[str, float]] = {}
    for variant in variants:
        rounds = [sum(map(sum, runs.values())) for runs in record.seconds[variant.name].values() if runs]
        if rounds:
            load = record.load_seconds[variant.name]
            found[variant.name] = {"load": round(load, 1), "cases": round(statistics.median(rounds), 1)}
    return found


def _about(case: Case) -> Row:
    return {"case": case.name, "size": case.size, "unit": case.unit}


def _skipped(case: Case, variant: Variant) -> Row | None:
    reason = variant.skips.get(SKIPPED.get(case.name, ""))
    if reason is None and case.name in ("decode", "total") and case.size > variant.max_streams:
        reason = f"more than {variant.max_streams} at once are left out, for the time of the whole benchmark"
    return None if reason is None else {"skipped": reason}


def _figure(
    case: Case, variant: Variant, record: Record, scale: Scale, rounds: int, spec: ModelSpec
) -> dict[str, Any] | None:
    samples = [figure(case, scale, record.seconds[variant.name][number]) for number in range(rounds)]
    measured = [sample for sample in samples if sample is not None]
    if not measured:
        return None
    shares = []
    for number, sample in enumerate(samples):
        machine = record.machines[variant.name][number].get(case.group)
        if sample is not None and machine is not None:
            floor = Floors(machine, spec, variant.precision).of(case, scale)
            shares.append(floor / sample if case.unit == "ms" else sample / floor)
    row = {
        "value": round(statistics.median(measured), 1),
        "rounds": [None if sample is None else round(sample, 1) for sample in samples],
    }
    return {**row, "of_floor": round(statistics.median(shares), 3)} if shares else row


def _memory(variant: Variant, record: Record) -> list[Row]:
    if variant.name not in record.peak_rss:
        return []
    figures = {
        "kv_memory": None if variant.kv_gib is None else variant.kv_gib * 1024,
        "loaded_rss": record.loaded_rss[variant.name] / MIB,
        "peak_rss": record.peak_rss[variant.name] / MIB,
    }
    return [
        {"case": name, "size": None, "unit": "MiB", "value": round(value)}
        for name, value in figures.items()
        if value is not None
    ]


def _same_first_tokens(record: Record, reference: str, engine: str) -> float | None:
    """Share of the prompts whose answers begin like the reference's. It is near 1 if both have the same weights."""
    pairs = [
        pair
        for number, runs in record.first[engine].items()
        for run, repetitions in runs.items()
        for tokens, others in zip(repetitions, record.first[reference][number].get(run, []), strict=False)
        for pair in zip(tokens, others, strict=True)
    ]
    return statistics.fmean(one == other for one, other in pairs) if pairs else None
