"""Writes the batching report as JSON and as an HTML page, and prints its main figures."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader
from markupsafe import Markup
from rich.console import Console
from rich.table import Table

from kvloom_load import plots

TEMPLATE = "report.html.jinja"
PIPE_WIDTH = 150

Row = dict[str, Any]


def write(folder: Path, name: str, meta: dict[str, Any], rows: list[Row]) -> Path:
    """Write NAME.json and NAME.html. Returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1), encoding="utf-8")
    page = folder / f"{name}.html"
    page.write_text(html(meta, rows), encoding="utf-8")
    return page


def html(meta: dict[str, Any], rows: list[Row]) -> str:
    """The page in one file, without scripts and external resources."""
    most = max(row["users"] for row in rows)
    talking = [row for row in rows if row["users"] == most and row["turns"]]
    environment = Environment(loader=FileSystemLoader(Path(__file__).parent), autoescape=True, trim_blocks=True)
    environment.filters["figure"] = lambda value: "–" if value is None else f"{value:,.4g}"
    return environment.get_template(TEMPLATE).render(
        meta=meta,
        rows=rows,
        checks=[(row, _means(row)) for row in rows],
        plots={name: Markup(svg) for name, svg in _plots(rows, meta).items()},  # noqa: S704 our own SVG
        talks=[row for row in rows if row["turns"]],
        turns=Markup(plots.turns(talking)) if talking else None,  # noqa: S704
        timelines=[
            (Markup(plots.timeline(row)), Markup(plots.latencies(row)))  # noqa: S704
            for row in rows
            if row["users"] == most
        ],
    )


def show(rows: list[Row]) -> None:
    """Print a table of the main figures."""
    table = Table("configuration", "users", "tokens/s", "efficiency", "TTFT p50 / p95", "ITL p50 / p95")
    for title in ("queue", "seqs/step", "prefix hits", "preempted", "good", "failed"):
        table.add_column(title)
    for row in rows:
        engine = row["engine"]
        table.add_row(
            row["configuration"],
            str(row["users"]),
            f"{row['tokens_per_s']:.1f}",
            _percent(row["efficiency"]),
            _two(row["ttft_ms"]),
            _two(row["itl_ms"]),
            "" if engine["queue_ms"] is None else f"{engine['queue_ms']:.0f} ms",
            "" if engine["sequences_per_step"] is None else f"{engine['sequences_per_step']:.1f}",
            _percent(engine["prefix_hits"]),
            f"{sum(engine['preemptions'].values()):.0f}",
            _percent(row["good_answers"]),
            str(row["failed"]),
        )
    console = Console()
    # In a file or a pipe, lines may be long
    (console if console.is_terminal else Console(width=PIPE_WIDTH)).print(table)


def _plots(rows: list[Row], meta: dict[str, Any]) -> dict[str, str]:
    def part(name: str, key: str) -> Callable[[Row], float | None]:
        return lambda row: (row[name] or {}).get(key)

    def batches(model: str) -> Callable[[Row], plots.Buckets]:
        return lambda row: row["triton"][model]["batches"]

    target = meta["target"]
    used = [model for model in ("llm", "generate") if any(map(batches(model), rows))]
    return {
        **{
            f"{model}_batches": plots.shares(rows, f"Triton's batches for {model}", "requests", batches(model))
            for model in used
        },
        "throughput": plots.over_users(rows, "Throughput", "tokens/s", {"": lambda row: row["tokens_per_s"]}),
        "efficiency": plots.over_users(rows, "Efficiency", "of N times one user", {"": lambda row: row["efficiency"]}),
        "ttft": plots.over_users(
            rows, "Time to first token", "ms", {"p50": part("ttft_ms", "p50"), "p95": part("ttft_ms", "p95")}
        ),
        "itl": plots.over_users(
            rows, "Time between tokens", "ms", {"p50": part("itl_ms", "p50"), "p95": part("itl_ms", "p95")}
        ),
        "goodput": plots.over_users(
            rows,
            f"Goodput: TTFT up to {target['ttft_ms']:g} ms, ITL up to {target['itl_ms']:g} ms",
            "answers/s",
            {"": lambda row: row["goodput_per_s"]},
        ),
        "queue": plots.over_users(rows, "Time in the engine's queue", "ms, mean", {"": part("engine", "queue_ms")}),
        "step_sequences": plots.shares(
            rows, "Steps by number of sequences", "up to", lambda row: row["engine"]["step_sequences"]
        ),
        "step_tokens": plots.shares(
            rows, "Steps by number of tokens", "up to", lambda row: row["engine"]["step_tokens"]
        ),
    }


def _means(row: Row) -> list[tuple[str, float | None, float | None]]:
    """For each figure that both measure: its name, the users' mean and the engine's mean."""
    return [
        (name, (row[key] or {}).get("mean"), row["engine"][key])
        for name, key in (("TTFT", "ttft_ms"), ("ITL", "itl_ms"), ("e2e", "e2e_ms"))
    ]


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def _two(summary: dict[str, float] | None) -> str:
    return "" if summary is None else f"{summary['p50']:.0f} / {summary['p95']:.0f} ms"
