"""The report's plots, as SVG."""

import io
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib

matplotlib.use("svg")
# Text stays text: small, searchable, in the reader's font
matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "kvloom", "font.size": 9, "axes.grid": True})

from matplotlib import colormaps  # noqa: E402
from matplotlib.axes import Axes  # noqa: E402
from matplotlib.figure import Figure  # noqa: E402
from matplotlib.ticker import MaxNLocator, ScalarFormatter  # noqa: E402

Row = dict[str, Any]
Buckets = list[tuple[float | None, float]]
"""Pairs of an upper bound, None for infinity, and the number of values in the bucket."""
WIDTH = 6.0


def over_users(rows: Sequence[Row], title: str, unit: str, lines: dict[str, Callable[[Row], float | None]]) -> str:
    """Plot figures over the number of users, with a colour for each configuration and a style for each of ``lines``."""
    figure, axes = _figure(3.0)
    highest = 0.0
    for number, configuration in enumerate(_configurations(rows)):
        for style, (name, figure_of) in zip(("-", "--", ":"), lines.items(), strict=False):
            points = {
                row["users"]: value
                for row in sorted(rows, key=lambda row: row["users"])
                if row["configuration"] == configuration and (value := figure_of(row)) is not None
            }
            label = f"{configuration}, {name}" if len(lines) > 1 else configuration
            axes.plot(list(points), list(points.values()), f"o{style}", color=f"C{number}", label=label)
            highest = max([highest, *points.values()])
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({row["users"] for row in rows}))
    axes.xaxis.set_major_formatter(ScalarFormatter())
    axes.minorticks_off()
    axes.set_ylim(0, 1.1 * highest or 1)
    axes.set(title=title, xlabel="users", ylabel=unit)
    axes.legend()
    return _svg(figure)


def shares(rows: Sequence[Row], title: str, unit: str, buckets_of: Callable[[Row], Buckets]) -> str:
    """Plot a bar for each test, divided by the share of each range of values."""
    counted = [dict(buckets_of(row)) for row in rows]
    bounds = sorted({bound for buckets in counted for bound in buckets}, key=lambda bound: bound or float("inf"))
    figure, axes = _figure(max(1.2 + 0.28 * len(rows), 0.6 + 0.2 * len(bounds)))
    left = [0.0] * len(rows)
    for number, bound in enumerate(bounds):
        parts = [buckets.get(bound, 0) / max(1, sum(buckets.values())) for buckets in counted]
        colour = colormaps["viridis"](number / max(1, len(bounds) - 1))
        label = "more" if bound is None else f"{bound:g}"
        axes.barh([_name(row) for row in rows], parts, left=left, color=colour, label=label)
        left = [before + part for before, part in zip(left, parts, strict=True)]
    axes.invert_yaxis()
    axes.set(title=title, xlim=(0, 1), xlabel="share")
    if bounds:
        axes.legend(title=unit, loc="center left", bbox_to_anchor=(1, 0.5))
    return _svg(figure)


def timeline(row: Row) -> str:
    """Plot tokens per second and requests in the engine over the time of one test."""
    figure, axes = _figure(2.6)
    seconds = range(1, len(row["timeline"]["tokens_per_s"]) + 1)
    axes.step(seconds, row["timeline"]["tokens_per_s"], "C0", where="mid", label="tokens/s")
    axes.set(title=_name(row), xlabel="seconds", ylabel="tokens/s")
    axes.set_ylim(bottom=0)
    requests = axes.twinx()
    requests.plot(seconds, row["timeline"]["running"], "C1--", label="running")
    requests.plot(seconds, row["timeline"]["waiting"], "C3:", label="waiting")
    requests.set_ylabel("requests")
    requests.set_ylim(bottom=0)
    requests.grid(visible=False)
    figure.legend(loc="outside lower center", ncols=3)
    return _svg(figure)


def turns(rows: Sequence[Row]) -> str:
    """Plot TTFT and computed tokens over the turns of conversations, for tests with the same number of users."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    first, second = figure.subplots(1, 2)
    for number, row in enumerate(rows):
        colour, at = f"C{number}", [turn["turn"] for turn in row["turns"]]
        first.plot(
            at, [turn["ttft_ms"]["p50"] for turn in row["turns"]], "o-", color=colour, label=row["configuration"]
        )
        second.plot(at, [turn["prompt_tokens"] for turn in row["turns"]], ":", color=colour, label="history and prompt")
        second.plot(at, [turn["computed_tokens"] for turn in row["turns"]], "o-", color=colour, label="computed")
    first.set(title="time to first token", xlabel="turn", ylabel="ms, p50")
    second.set(title="tokens", xlabel="turn", ylabel="mean")
    for axes in (first, second):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        axes.set_ylim(bottom=0)
        axes.legend()
    return _svg(figure)


def latencies(row: Row) -> str:
    """Plot percentiles of TTFT and ITL over the time of one test."""
    figure = Figure(figsize=(WIDTH, 2.6), layout="constrained")
    for axes, (key, name) in zip(
        figure.subplots(1, 2), (("ttft_ms", "time to first token"), ("itl_ms", "time between tokens")), strict=True
    ):
        for style, percentile in (("C0-", "p50"), ("C1--", "p95")):
            points = {
                second: summary[percentile]
                for second, summary in enumerate(row["latencies"][key], start=1)
                if summary is not None
            }
            axes.plot(list(points), list(points.values()), style, label=percentile)
        axes.set(title=name, xlabel="seconds", ylabel="ms")
        axes.set_ylim(bottom=0)
        axes.legend()
    return _svg(figure)


def _name(row: Row) -> str:
    return f"{row['configuration']}, {row['users']} user{'s' if row['users'] > 1 else ''}"


def _configurations(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["configuration"] for row in rows))


def _figure(height: float) -> tuple[Figure, Axes]:
    figure = Figure(figsize=(WIDTH, height), layout="constrained")
    return figure, figure.subplots()


def _svg(figure: Figure) -> str:
    """The figure as an <svg> element for a page."""
    written = io.StringIO()
    figure.savefig(written, format="svg", metadata={"Date": None})
    text = written.getvalue()
    return text[text.index("<svg") :]
