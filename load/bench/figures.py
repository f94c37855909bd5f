"""Renders the main figures from the results of a benchmark and a profile."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import compare
from bench.profile_step import REPLAYED, STEP
from bench.tables import cells, columns, comparison_tables, faster, render, title
from bench.variants import about, variants

LEFT_OUT = ("loaded_rss", "same_first_token")
"""Columns of bench.md that are not main figures."""

OPS_SHOWN = 5
LEAST_ROUNDS = 3
"""A median of fewer rounds is not reliable."""

Row = dict[str, Any]


class ResultsError(Exception):
    """The results can't be the main figures. The message says why."""


def figures(results: Path) -> str:
    """The text of figures.md, from ``bench.json`` and ``profile.json`` in that folder.

    Raises:
        ResultsError: they have too few rounds, or other engines or settings than the current ones.
    """
    bench, profile = (json.loads((results / f"{name}.json").read_text()) for name in ("bench", "profile"))
    _check(bench, profile)
    return _figures(bench, profile)


def _check(bench: Mapping[str, Any], profile: Mapping[str, Any]) -> None:
    meta = bench["meta"]
    if meta["rounds"] < LEAST_ROUNDS:
        raise ResultsError(f"bench.json has {meta['rounds']} rounds, figures need {LEAST_ROUNDS}; run it again")
    # In the form in which they are read from a file
    today = {one["name"]: one for one in json.loads(json.dumps(list(map(about, variants()))))}
    measured = {one["name"]: one for one in meta["variants"]}
    differ = [name for name in {**today, **measured} if today.get(name) != measured.get(name)]
    if differ:
        raise ResultsError(f"bench.json has outdated engines or settings ({', '.join(differ)}); run it again")
    if not any(row["op"] == REPLAYED for row in profile["rows"]):
        raise ResultsError(f"profile.json has no '{REPLAYED}'; run the profile again")


def _figures(bench: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    made = bench["rows"]
    measured = [row for row in made if not row["engine"].startswith("floor ")]
    wanted = [column for column in columns(measured) if column[0] not in LEFT_OUT]
    lines = {name: line for name, line in cells(measured).items() if line}
    return render(
        "figures.md.jinja",
        meta=bench["meta"],
        titles=list(map(title, wanted)),
        lines={name: [_value(line.get(column, "")) for column in wanted] for name, line in lines.items()},
        comparisons=comparison_tables([row for row in bench["compared"] if _is_main(row)]),
        steps=_steps(profile["rows"]),
    )


def _is_main(row: Row) -> bool:
    """Whether a comparison is a main figure. Those with single peers and the default file are only in bench.md."""
    return row["what"] != compare.DEFAULT_FILE and (row["what"] != compare.PEERS or row.get("best", False))


def _value(cell: str) -> str:
    """A cell without the share of the floor."""
    return cell.split(" (")[0]


def _steps(rows: Sequence[Row]) -> list[str]:
    """A line for each number of streams: the time of the whole step and of the ops that take the most."""
    lines = []
    for streams in dict.fromkeys(row["streams"] for row in rows):
        here = [row for row in rows if row["streams"] == streams]
        # The whole step is replayed as when serving; ops can only be timed in a step that is computed op by op
        whole = next(row for row in here if row["op"] == REPLAYED)
        ops = sorted((row for row in here if row["op"] not in (STEP, REPLAYED)), key=lambda row: -row["ms"])
        noun = "stream" if streams == 1 else "streams"
        lines.append(
            f"{streams} {noun}: {_time(whole)}; " + ", ".join(f"{row['op']} {_time(row)}" for row in ops[:OPS_SHOWN])
        )
    return lines


def _time(row: Row) -> str:
    floor = "" if row["floor_ms"] is None else f" (floor {row['floor_ms']:.1f}{', faster' if faster(row) else ''})"
    return f"{row['ms']:.1f} ms{floor}"
