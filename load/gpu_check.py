"""Check and time the GPU kernels and steps on a GPU. Writes build/reports/gpu-check.json.

Needs the repository, torch, triton and numpy. It has not run on a GPU yet. It stops after 7 minutes, a budget for an
H200, and reports the remaining checks as not run. ``--dry`` runs the same code on a CPU in triton's interpreter with
tiny shapes; ignore its times.
"""

import argparse
import gc
import json
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
for folder in ("load", "backend_src"):
    # For machines on which kvloom is not installed
    sys.path.insert(0, str(ROOT / folder))

if "--dry" in sys.argv[1:]:
    # triton reads it when it is imported
    os.environ["TRITON_INTERPRET"] = "1"

import torch  # noqa: E402
import triton  # noqa: E402

from kvloom.ops.gpu import use_triton_everywhere  # noqa: E402
from kvloom_gpu import exact, speed, steps  # noqa: E402
from kvloom_gpu.bench import Clock, copy_bandwidth  # noqa: E402
from kvloom_gpu.sizes import Sizes, dry, h200  # noqa: E402

SECONDS = 420
"""The budget. After this time the remaining checks are reported as not run."""

Part = Callable[[], Iterator[dict[str, Any]]]


class CheckReport:
    """Writes each row at once, so that an interrupted run leaves its results."""

    def __init__(self, path: Path, meta: dict[str, Any]):
        self._path = path
        self._began = time.monotonic()
        self.meta = meta
        self.rows: list[dict[str, Any]] = []
        path.parent.mkdir(parents=True, exist_ok=True)

    def run(self, part: str, rows: Part) -> None:
        """Add a part's rows until the time is up. If it fails, its error is a row, and the other parts still run."""
        began = time.monotonic()
        try:
            for row in rows():
                self._add({"part": part, **row})
                if time.monotonic() - self._began > SECONDS:
                    self._add({"part": part, "ok": False, "detail": f"cut short after {SECONDS} s"})
                    break
        except Exception:  # noqa: BLE001 the other parts must still run
            self._add({"part": part, "ok": False, "detail": traceback.format_exc()[-3000:]})
        gc.collect()
        torch.cuda.empty_cache()
        self.meta[f"{part}_s"] = round(time.monotonic() - began, 1)
        self._write()

    def _add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        print(_line(row), flush=True)
        self._write()

    def _write(self) -> None:
        self._path.write_text(json.dumps({"meta": self.meta, "rows": self.rows}, indent=1))


def _line(row: dict[str, Any]) -> str:
    """A row as text."""
    values = [f"{key}={value:.4g}" if isinstance(value, float) else f"{key}={value}" for key, value in row.items()]
    return ("" if row.get("ok", True) else "FAILED ") + " ".join(values)


def _meta(sizes: Sizes, seed: int) -> dict[str, Any]:
    on_gpu = sizes.device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(sizes.device) if on_gpu else f"CPU, a dry run: {platform.machine()}",
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
        "seed": seed,
    }


def main() -> int:
    """Run all parts. Returns 0 if everything is correct."""
    # No abbreviations, because the check for --dry above would not see them
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--dry", action="store_true", help="on the CPU, in triton's interpreter")
    parser.add_argument("--report", type=Path, default=ROOT / "build" / "reports" / "gpu-check.json")
    arguments = parser.parse_args()
    if arguments.dry:
        sizes = dry()
        use_triton_everywhere(True)
    elif torch.cuda.is_available():
        sizes = h200(torch.device("cuda:0"))
    else:
        parser.error(f"torch finds no GPU; to run the same code on a CPU: {sys.executable} {sys.argv[0]} --dry")
    seed = time.time_ns() % 2**31
    torch.manual_seed(seed)
    report = CheckReport(arguments.report, _meta(sizes, seed))
    clock = Clock(sizes.device, sizes.repeats)
    bandwidth = copy_bandwidth(clock, sizes.device, sizes.copy_bytes)
    report.meta["copy_gb_s"] = bandwidth / 1e9
    report.run("exact", lambda: exact.rows(sizes))
    report.run("toy", lambda: steps.toy_rows(sizes))
    report.run("steps", lambda: steps.step_rows(sizes, clock, bandwidth))
    report.run("speed", lambda: speed.rows(sizes, clock, bandwidth))
    bad = [row for row in report.rows if not row.get("ok", True)]
    print(f"{len(report.rows)} rows, {len(bad)} failed; {json.dumps(report.meta)}; {arguments.report}")
    return int(bool(bad))


if __name__ == "__main__":
    sys.exit(main())
