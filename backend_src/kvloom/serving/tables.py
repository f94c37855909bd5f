"""Writes kvloom's declarations into the files of a source tree: ``make tables``.

It writes the inputs and outputs of every model's config.pbtxt and the tables in the README.md files. It recognizes a
README's table by its first row.
"""

import re
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

from kvloom.config import Settings
from kvloom.request import SamplingParams
from kvloom.serving.interface import INPUTS, OUTPUTS, Tensor
from kvloom.serving.metric_families import FAMILIES

ROOT = Path(__file__).parents[3]

Row = tuple[str, ...]


def config_text(text: str) -> str:
    """A model's config.pbtxt with all inputs and outputs, which come last in it."""
    head, found, _ = text.partition("\ninput [\n")
    if not found:
        raise SystemExit("a config.pbtxt has no line `input [`: add one; everything below it will be overwritten")
    return f"{head}\ninput [\n{_rows(INPUTS, ' optional: true')}\n]\n\noutput [\n{_rows(OUTPUTS)}\n]\n"


def readme_text(text: str) -> str:
    """A README with its tables brought up to date."""
    for first, rows in TABLES.items():
        table = _table(first, rows()).replace("\\", r"\\")
        text = re.sub(_pattern(first), table, text)
    return text


def tables_in(text: str) -> list[str]:
    """The first row of each of kvloom's tables in a README. A table that occurs twice is listed twice."""
    return [first for first in TABLES for _ in re.finditer(_pattern(first), text)]


def files() -> dict[Path, Callable[[str], str]]:
    """The files that are written. Each one's function makes its new text from its current text."""
    configs = sorted(ROOT.glob("model_repository/*/config.pbtxt"))
    # Not .venv, which has thousands of folders, and not build, which building a wheel leaves behind
    folders = [folder for folder in sorted(ROOT.glob("[!.]*/")) if folder.name != "build"]
    readmes = [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.rglob("README.md")))]
    return {**dict.fromkeys(configs, config_text), **dict.fromkeys(readmes, readme_text)}


def main() -> None:
    """Write every file that is out of date."""
    for path, make in files().items():
        text = path.read_text(encoding="utf-8")
        if (new := make(text)) != text:
            path.write_text(new, encoding="utf-8")
            print(f"wrote {path.relative_to(ROOT)}", file=sys.stderr)


def _rows(tensors: Iterable[Tensor], more: str = "") -> str:
    return ",\n".join(
        f'  {{ name: "{own.name}" data_type: TYPE_{own.type} dims: [ {own.dims} ]{more} }}' for own in tensors
    )


def _tensor_rows(tensors: Iterable[Tensor]) -> list[Row]:
    """The rows of a table of tensors. Tensors of the same type and description share a row."""
    names: dict[tuple[str, str], list[str]] = {}
    for own in tensors:
        kind = f"{own.type.replace('STRING', 'BYTES')} `{own.shape}`"
        names.setdefault((kind, own.about), []).append(f"`{own.name}`")
    return [(", ".join(several), kind, about) for (kind, about), several in names.items()]


def _sampling_rows() -> list[Row]:
    rows: list[Row] = []
    for name, field in SamplingParams.model_fields.items():
        default = field.default if field.default not in (None, (), {}) else "none"
        shown = str(default).lower() if isinstance(default, bool) else str(default)
        rows.append((f"`{name}`", shown, field.description or ""))
    return rows


def _setting_rows() -> list[Row]:
    return [
        (f"`{name}`", default if default.isdecimal() else f"`{default}`" if default else "none", about)
        for name, default, about in Settings.described()
    ]


def _metric_rows() -> list[Row]:
    return [(f"`{own.name}{{{own.label}}}`" if own.label else f"`{own.name}`", own.kind, own.about) for own in FAMILIES]


TABLES: dict[str, Callable[[], list[Row]]] = {
    "| name | type | meaning |": lambda: _tensor_rows(INPUTS),
    "| output | type | meaning |": lambda: _tensor_rows(OUTPUTS),
    "| sampling key | default | range |": _sampling_rows,
    "| setting | default | meaning |": _setting_rows,
    "| metric | kind | meaning |": _metric_rows,
}
"""The functions that make the tables' rows, by the table's first row."""


def _pattern(first: str) -> str:
    return rf"(?m)^{re.escape(first)}\n(\|.*\n)*"


def _table(first: str, rows: Iterable[Row]) -> str:
    rule = "|" + "---|" * (first.count("|") - 1)
    return "\n".join([first, rule, *(f"| {' | '.join(row)} |" for row in rows)]) + "\n"


if __name__ == "__main__":
    main()
