"""Shows the results as tables on the terminal and in Markdown."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from rich.console import Console
from rich.table import Table

from bench import compare

TEMPLATE = "results.md.jinja"
PIPE_WIDTH = 300
QUICK = "This was a quick run with a few tokens. It checks that everything works; ignore its figures."

Row = dict[str, Any]
Column = tuple[str, int | None]

MEMORY = ("kv_memory", "loaded_rss", "peak_rss")
ORDER = ("decode", "total", "prefill", "ttft_cold", "ttft_warm", "shared", *MEMORY, "same_first_token")
TITLES = {"ttft_cold": "TTFT cold, ms", "ttft_warm": "TTFT warm, ms", "shared": "sharing a prefix"}
EXTRA_TITLES = {
    "kv_memory": "memory for keys and values, MiB",
    "loaded_rss": "RSS when loaded, MiB",
    "peak_rss": "peak RSS, MiB",
    "same_first_token": "same first token",
}


def columns(made: Sequence[Row]) -> list[Column]:
    """The case and size of each column."""
    found = dict.fromkeys((row["case"], row["size"]) for row in made if "case" in row)
    return sorted(found, key=lambda column: (ORDER.index(column[0]), column[1] or 0))


def title(column: Column) -> str:
    """The title of a column."""
    case, size = column
    if case in EXTRA_TITLES:
        return EXTRA_TITLES[case]
    return TITLES[case] if case.startswith("ttft") else f"{TITLES.get(case, case)} {size}"


def cells(made: Sequence[Row]) -> dict[str, dict[Column, str]]:
    """The text of each cell, by engine and column. A skipped case is a dash."""
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
    value = f"{row['value']:,.1f}" if row["value"] < 100 and row["unit"] != "MiB" else f"{row['value']:,.0f}"
    rounds = row.get("rounds", ())
    if None in rounds:
        value += f" [{len(rounds) - rounds.count(None)} of {len(rounds)} rounds]"
    return f"{value} ({row['of_floor']:.0%})" if "of_floor" in row else value


def absences(made: Sequence[Row]) -> dict[str, str]:
    """Why engines have no figures, by engine."""
    return {row["engine"]: row["absent"] for row in made if "absent" in row}


@dataclass(frozen=True)
class Comparison:
    """A table of ratios.

    Attributes:
        title: the title.
        header: the titles of the columns.
        lines: the cells of each line.
    """

    title: str
    header: list[str]
    lines: list[list[str]]


def comparison_tables(compared: Sequence[Row]) -> list[Comparison]:
    """A table for each kind of comparison in ``compare.comparisons`` that has rows."""
    peers = [row for row in compared if row["what"] == compare.PEERS]
    best = [row for row in peers if row.get("best")]
    tables = [
        _matrix(f"{compare.ALONE} against", [row for row in peers if not row.get("best")], "against"),
        _list(f"{compare.ALONE} against the best peer with bf16 weights", best),
        _list(
            f"{compare.DOORS[0]} against the best peer with bf16 weights (llama.cpp behind its own HTTP server, "
            "the others in-process)",
            _of(compared, compare.SERVED),
        ),
        _list("The best of kvloom against the best peer, with any weights", _of(compared, compare.BEST)),
        _list("The best of kvloom against llama.cpp on the default file", _of(compared, compare.DEFAULT_FILE)),
        _matrix("Behind an endpoint against the engine in-process", _of(compared, compare.DOOR), "engine"),
    ]
    more = _of(compared, compare.MORE)
    if more:
        tables.append(_matrix(f"Total with more streams against {more[0]['than']}", more, "engine"))
    return [table for table in tables if table.lines]


def _of(compared: Sequence[Row], what: str) -> list[Row]:
    return [row for row in compared if row["what"] == what]


def _matrix(title_of_all: str, compared: Sequence[Row], key: str) -> Comparison:
    """A line for each engine, a column for each case."""
    wanted = columns(compared)
    cells = {(row[key], (row["case"], row["size"])): ratio(row) for row in compared}
    lines = [
        [name, *(cells.get((name, column), "-") for column in wanted)]
        for name in dict.fromkeys(row[key] for row in compared)
    ]
    return Comparison(title_of_all, ["", *map(_short_title, wanted)], lines)


def _list(title_of_all: str, compared: Sequence[Row]) -> Comparison:
    """A line for each case."""
    lines = [
        [_short_title((row["case"], row["size"])), *_names(row), ratio(row)]
        for row in sorted(compared, key=lambda row: (ORDER.index(row["case"]), row["size"] or 0))
    ]
    return Comparison(title_of_all, ["case", "kvloom", "peer", "ratio (rounds)"], lines)


def _names(row: Row) -> list[str]:
    """The names of both engines. In comparisons of memory they include the memory for keys and values."""
    names = [row["engine"], row["against"]]
    if "kv_mib" not in row:
        return names
    each = ["no limit" if mib is None else f"{mib:,.0f} MiB" for mib in row["kv_mib"]]
    return [f"{name} (keys and values: {memory})" for name, memory in zip(names, each, strict=True)]


def _short_title(column: Column) -> str:
    return title(column).split(",")[0]


def ratio(row: Row) -> str:
    """The ratio of the medians, with the minimum and maximum of the rounds in brackets."""
    rounds = row["rounds"]
    return f"{row['ratio']:.2f}" + (f" ({rounds[0]:.2f}-{rounds[1]:.2f})" if rounds else "")


def show(made: Sequence[Row], compared: Sequence[Row], console: Console) -> None:
    """Print the tables: figures with the share of the floor in brackets, then ratios."""
    wanted = columns(made)
    table = Table("engine", *map(title, wanted))
    for engine, line in cells(made).items():
        table.add_row(engine, *(line.get(column, "") for column in wanted))
    console.print(table)
    for comparison in comparison_tables(compared):
        table = Table(*comparison.header, title=comparison.title)
        for cells_of_line in comparison.lines:
            table.add_row(*cells_of_line)
        console.print(table)
    for engine, why in absences(made).items():
        console.print(f"{engine}: {why}", markup=False)


def show_profile(made: Sequence[Row], console: Console) -> None:
    """Print the time of each part of a step."""
    table = Table("streams", "op", "ms", "share", "floor, ms")
    for row in made:
        floor = "" if row["floor_ms"] is None else f"{row['floor_ms']:.2f}{', faster' if faster(row) else ''}"
        table.add_row(str(row["streams"]), row["op"], f"{row['ms']:.2f}", f"{row['share']:.1%}", floor)
    console.print(table)


def faster(row: Row) -> bool:
    """Whether an op took less time than its floor."""
    return row["floor_ms"] is not None and row["ms"] < row["floor_ms"]


def warn(unsteady: Sequence[str], rounds: int, console: Console) -> None:
    """Print a warning for each rate of the machine that changed. The ratios of several rounds show the effect."""
    see = ", see the rounds' own ratios" if rounds > 1 else ""
    for what in unsteady:
        console.print(f"the machine changed while it was measured{see}: {what}", markup=False)


def console() -> Console:
    """The console. In a file or a pipe, lines may be long."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=PIPE_WIDTH)


def markdown(meta: Mapping[str, Any], made: Sequence[Row], compared: Sequence[Row]) -> str:
    """The text of the results file."""
    wanted = columns(made)
    return render(
        TEMPLATE,
        meta=meta,
        titles=list(map(title, wanted)),
        lines={engine: [line.get(column, "") for column in wanted] for engine, line in cells(made).items()},
        absences=absences(made),
        skipped=dict.fromkeys((row["engine"], row["skipped"]) for row in made if "skipped" in row),
        comparisons=comparison_tables(compared),
    )


def render(template: str, **values: Any) -> str:
    """Render a template in this folder."""
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), trim_blocks=True, autoescape=False)
    return environment.get_template(template).render(**values)
