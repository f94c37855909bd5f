"""Plots the results: a field for each case, a bar for each engine, a mark for its floor.

Colours are precisions. Peers are paler than kvloom.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.tables import Column, columns, title
from bench.variants import OWN_NAME
from kvloom_load import plots  # noqa: F401 sets the style of all plots

ACROSS = 3
WIDTH, ROW_HEIGHT, HEAD = 13.0, 0.2, 0.6
PALE = 0.45

LEFT_OUT = ("same_first_token", "kv_memory", "loaded_rss")


def draw(made: Sequence[dict[str, Any]], file: Path) -> None:
    """Write the plot. The file's name determines the format."""
    # Floors are drawn as marks
    made = [row for row in made if "value" in row and not row["engine"].startswith("floor ")]
    wanted = [column for column in columns(made) if column[0] not in LEFT_OUT]
    engines = list(dict.fromkeys(row["engine"] for row in made))
    down = -(-len(wanted) // ACROSS)
    figure = Figure(figsize=(WIDTH, down * (HEAD + ROW_HEIGHT * len(engines))), layout="constrained")
    fields = list(figure.subplots(down, ACROSS, squeeze=False, sharey=True).flat)
    for axes, column in zip(fields, wanted, strict=False):
        _field(axes, column, engines, made)
    for axes in fields[len(wanted) :]:
        axes.set_visible(False)
    figure.savefig(file, metadata={"Date": None} if file.suffix == ".svg" else None)


def _field(axes: Axes, column: Column, engines: list[str], made: Sequence[dict[str, Any]]) -> None:
    here = {row["engine"]: row for row in made if (row["case"], row["size"]) == column}
    precisions = list(dict.fromkeys(row["precision"] for row in made))
    for name, row in here.items():
        colour = (f"C{precisions.index(row['precision'])}", 1.0 if name.startswith(OWN_NAME) else PALE)
        axes.barh(engines.index(name), row["value"], color=colour)
        axes.text(row["value"], engines.index(name), f" {row['value']:,.0f}", va="center", fontsize=7)
        if "floor" in row:
            axes.plot([row["floor"]], [engines.index(name)], "k|", markersize=9)
    axes.set_yticks(range(len(engines)), engines)
    axes.set_ylim(len(engines) - 0.5, -0.5)
    axes.margins(x=0.15)
    axes.set_title(title(column))
    axes.grid(visible=False)
