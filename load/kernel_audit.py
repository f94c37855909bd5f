"""Audit the GPU kernels' machine code without a GPU. Writes build/reports/kernel-audit.json."""

import json
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from kvloom_gpu.audit import audit, meta, print_table
from kvloom_gpu.compiling import TARGETS
from kvloom_gpu.launches import works
from kvloom_gpu.op_launches import op_works

REPORT = Path("build/reports/kernel-audit.json")


def main(
    target: Annotated[list[str] | None, typer.Option(help=f"One of {', '.join(TARGETS)}. May be repeated.")] = None,
    report: Annotated[Path, typer.Option(help="File of the rows.", metavar="FILE")] = REPORT,
) -> None:
    """Compile every kernel at every shape for every target and check its limits."""
    rows = audit([*works(), *op_works()], target or list(TARGETS))
    report.parent.mkdir(parents=True, exist_ok=True)
    report.write_text(json.dumps({"meta": meta(), "rows": [row.values() for row in rows]}, indent=1))
    console = Console(width=None if sys.stdout.isatty() else 160)
    print_table(rows, console)
    bad = sum(not row.ok for row in rows)
    console.print(f"{len(rows)} kernels, {bad} beyond their limits; rows: {report}")
    raise typer.Exit(bad > 0)


if __name__ == "__main__":
    typer.run(main)
