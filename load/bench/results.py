"""From the record to the rows of bench.json."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.cases import Case, Scale, cases, figure
from bench.floors import PRECISIONS, Floors, Machine
from bench.record import Record
from bench.variants import Variant
from kvloom.models.spec import ModelSpec

Row = dict[str, Any]
SKIPPED = {"ttft_warm": "warm", "shared": "shared"}
"""Which kind of run a case stands and falls with."""


def rows(variants: Sequence[Variant], record: Record, scale: Scale, machine: Machine, spec: ModelSpec) -> list[Row]:
    """A row for every engine and case, one for each engine's memory, or one that says why there are none.

    The figure of a case is the median over the rounds.
    """
    made: list[Row] = []
    for variant in variants:
        about = {"engine": variant.name, "precision": variant.precision}
        if variant.name in record.absent:
            made.append({**about, "absent": record.absent[variant.name]})
        floors = Floors(machine, spec, variant.precision)
        for case in cases(scale):
            made += [{**about, **row} for row in _case(case, variant, record, scale, floors.of(case, scale))]
        if variant.name in record.peak_rss:
            mib = round(record.peak_rss[variant.name] / 2**20)
            made.append({**about, "case": "peak_rss", "size": None, "unit": "MiB", "value": mib})
        same = _same_first_tokens(record, variants[0].name, variant.name)
        if same is not None:
            made.append({**about, "case": "same_first_token", "size": None, "unit": "share", "value": round(same, 4)})
    return made


def floor_rows(variants: Sequence[Variant], scale: Scale, machine: Machine, spec: ModelSpec) -> list[Row]:
    """What the machine allows, for every precision among the variants."""
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


def _about(case: Case) -> Row:
    return {"case": case.name, "size": case.size, "unit": case.unit}


def _case(case: Case, variant: Variant, record: Record, scale: Scale, floor: float) -> list[Row]:
    reason = variant.skips.get(SKIPPED.get(case.name, ""))
    if reason is None and case.name in ("decode", "total") and case.size > variant.most_streams:
        reason = "left out: it would take minutes"
    if reason is not None:
        return [{**_about(case), "skipped": reason}]
    samples = [figure(case, scale, seconds) for _, seconds in sorted(record.seconds[variant.name].items())]
    measured = [sample for sample in samples if sample is not None]
    if not measured:
        return []
    value = statistics.median(measured)
    share = floor / value if case.unit == "ms" else value / floor
    return [
        {
            **_about(case),
            "value": round(value, 1),
            "rounds": [round(sample, 1) for sample in measured],
            "floor": round(floor, 1),
            "of_floor": round(share, 3),
        }
    ]


def _same_first_tokens(record: Record, reference: str, engine: str) -> float | None:
    """Share of the prompts whose answers begin as the reference's: near 1 where both have the same weights."""
    pairs = [
        pair
        for number, runs in record.first[engine].items()
        for run, tokens in runs.items()
        for pair in zip(tokens, record.first[reference][number].get(run, []), strict=False)
    ]
    return statistics.fmean(one == other for one, other in pairs) if pairs else None


def serving_cost(made: Sequence[Row], doors: Mapping[str, str]) -> dict[int, dict[str, float]]:
    """Share of the engine's own tokens per second that is left behind each door, by number of prompts at once.

    Args:
        made: of ``rows``.
        doors: name of the engine alone, by the name of the same engine behind a door.
    """
    totals = {
        (row["engine"], row["size"]): row["value"] for row in made if row.get("case") == "total" and "value" in row
    }
    shares: dict[int, dict[str, float]] = {}
    for (engine, size), value in totals.items():
        alone = totals.get((doors.get(engine, ""), size))
        if alone:
            shares.setdefault(size, {})[engine] = round(value / alone, 3)
    return shares
