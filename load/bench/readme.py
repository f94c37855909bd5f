"""The README's figures, from the files that a benchmark and a profile wrote."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench import compare
from bench.tables import cells, columns, comparison_tables, render, title

BEGIN, END = "<!-- figures of load/results, by load/benchmark.py readme -->\n", "<!-- end of the figures -->\n"

LEFT_OUT = ("loaded_rss", "same_first_token")
"""Columns of the results file that the README does not have."""

OPS_SHOWN = 5

Row = dict[str, Any]


def filled(readme: str, results: Path) -> str:
    """The README's text with the figures of ``bench.json`` and ``profile.json`` between its two marks."""
    before, rest = readme.split(BEGIN)
    _, after = rest.split(END)
    bench, profile = (json.loads((results / f"{name}.json").read_text()) for name in ("bench", "profile"))
    return before + BEGIN + _figures(bench, profile) + END + after


def _figures(bench: Mapping[str, Any], profile: Mapping[str, Any]) -> str:
    made = bench["rows"]
    measured = [row for row in made if not row["engine"].startswith("floor ")]
    wanted = [column for column in columns(measured) if column[0] not in LEFT_OUT]
    lines = {name: line for name, line in cells(measured).items() if line}
    return render(
        "readme.md.jinja",
        meta=bench["meta"],
        titles=list(map(title, wanted)),
        lines={name: [_value(line.get(column, "")) for column in wanted] for name, line in lines.items()},
        comparisons=comparison_tables([row for row in bench["compared"] if _is_main(row)]),
        steps=_steps(profile["rows"]),
    )


def _is_main(row: Row) -> bool:
    """Each peer on its own, and the default file alone, are in the results file."""
    return row["what"] != compare.DEFAULT_FILE and (row["what"] != compare.PEERS or row.get("best", False))


def _value(cell: str) -> str:
    """Without the share of the floor."""
    return cell.split(" (")[0]


def _steps(rows: Sequence[Row]) -> list[str]:
    """A line for each number of streams: the whole step, and the ops that take most of it."""
    lines = []
    for streams in dict.fromkeys(row["streams"] for row in rows):
        here = [row for row in rows if row["streams"] == streams]
        whole = next(row for row in here if row["op"] == "whole step")
        ops = sorted((row for row in here if row is not whole), key=lambda row: -row["ms"])[:OPS_SHOWN]
        noun = "stream" if streams == 1 else "streams"
        lines.append(f"{streams} {noun}: {_time(whole)}; " + ", ".join(f"{row['op']} {_time(row)}" for row in ops))
    return lines


def _time(row: Row) -> str:
    floor = "" if row["floor_ms"] is None else f" (floor {row['floor_ms']:.1f})"
    return f"{row['ms']:.1f} ms{floor}"
