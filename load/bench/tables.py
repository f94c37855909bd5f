"""The results for people: a table for the terminal, the same in Markdown."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console
from rich.table import Table

TEMPLATE = "results.md.jinja"
PIPE_WIDTH = 200

Row = dict[str, Any]
Column = tuple[str, int | None]

ORDER = ("decode", "total", "prefill", "ttft_cold", "ttft_warm", "shared", "peak_rss", "same_first_token")
TITLES = {"ttft_cold": "TTFT cold, ms", "ttft_warm": "TTFT warm, ms", "shared": "sharing a prefix"}
EXTRA_TITLES = {"peak_rss": "peak RSS, MiB", "same_first_token": "same first token"}


def columns(made: Sequence[Row]) -> list[Column]:
    """Case and size of each column that some row has."""
    found = dict.fromkeys((row["case"], row["size"]) for row in made if "case" in row)
    return sorted(found, key=lambda column: (ORDER.index(column[0]), column[1] or 0))


def title(column: Column) -> str:
    """Of a column."""
    case, size = column
    if case in EXTRA_TITLES:
        return EXTRA_TITLES[case]
    return TITLES[case] if case.startswith("ttft") else f"{TITLES.get(case, case)} {size}"


def cells(made: Sequence[Row]) -> dict[str, dict[Column, str]]:
    """Texts by engine and column; what an engine leaves out is a dash."""
    texts: dict[str, dict[Column, str]] = {}
    for row in made:
        line = texts.setdefault(row["engine"], {})
        if "case" in row:
            line[row["case"], row["size"]] = _text(row)
    return texts


def _text(row: Row) -> str:
    if "skipped" in row:
        return "-"
    if row["case"] == "same_first_token":
        return f"{row['value']:.1%}"
    value = f"{row['value']:,.1f}" if row["value"] < 100 and row["case"] != "peak_rss" else f"{row['value']:,.0f}"
    return f"{value} ({row['of_floor']:.0%})" if "of_floor" in row else value


def absences(made: Sequence[Row]) -> dict[str, str]:
    """By engine, why it has no figures."""
    return {row["engine"]: row["absent"] for row in made if "absent" in row}


def show(made: Sequence[Row], console: Console) -> None:
    """Print the table: tokens per second and milliseconds, in brackets the share of the floor."""
    wanted = columns(made)
    table = Table("engine", *map(title, wanted))
    for engine, line in cells(made).items():
        table.add_row(engine, *(line.get(column, "") for column in wanted))
    console.print(table)
    for engine, why in absences(made).items():
        console.print(f"{engine}: {why}", markup=False)


def show_profile(made: Sequence[Row], console: Console) -> None:
    """Print where the time of a step goes."""
    table = Table("streams", "op", "ms", "share", "floor, ms")
    for row in made:
        floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}"
        table.add_row(str(row["streams"]), row["op"], f"{row['ms']:.2f}", f"{row['share']:.1%}", floor)
    console.print(table)


def warn(unsteady: Sequence[str], console: Console) -> None:
    """Say that the machine was not the same before and after."""
    for what in unsteady:
        console.print(f"the machine was busy with something else, distrust these figures: {what}", markup=False)


def console() -> Console:
    """Of the terminal; into a file or a pipe, lines may be long."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)


def markdown(meta: Mapping[str, Any], made: Sequence[Row]) -> str:
    """The results file."""
    wanted = columns(made)
    cost: Mapping[int, Mapping[str, float]] = meta["serving_cost"]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, autoescape=False)
    return environment.get_template(TEMPLATE).render(
        meta=meta,
        titles=list(map(title, wanted)),
        lines={engine: [line.get(column, "") for column in wanted] for engine, line in cells(made).items()},
        absences=absences(made),
        skipped=dict.fromkeys((row["engine"], row["skipped"]) for row in made if "skipped" in row),
        doors=dict.fromkeys(door for shares in cost.values() for door in shares),
    )
