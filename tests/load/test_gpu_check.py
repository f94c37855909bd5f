"""The GPU check runs dry: the same code on the CPU, at tiny shapes, in triton's interpreter."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECK = Path(__file__).parents[2] / "load" / "gpu_check.py"

ABSENT = ("pydantic", "gguf", "rich", "typer", "psutil", "transformers", "tokenizers", "safetensors", "tritonclient")
"""What the check does not need: machines that are lent for it have torch and triton."""


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    code = f"""
import runpy, sys
sys.modules.update(dict.fromkeys({ABSENT!r}))
sys.argv = {[str(CHECK), *map(str, arguments)]!r}
runpy.run_path(sys.argv[0], run_name="__main__")
"""
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.mark.slow
def test_a_dry_run_finds_everything_right(tmp_path):
    done = run("--dry", "--report", tmp_path / "report.json")
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    report = json.loads((tmp_path / "report.json").read_text())
    assert "dry run" in report["meta"]["device"]
    parts = {
        part: [row for row in report["rows"] if row["part"] == part] for part in ("exact", "toy", "steps", "speed")
    }
    assert {row["check"] for row in parts["exact"]} >= {"attention: mixed", "rope of queries", "sampling: tokens"}
    assert all(row["error"] <= row["limit"] for row in parts["exact"] if "error" in row)
    assert [row["check"] for row in parts["toy"]] == ["toy tokens, graphs", "toy tokens, no graphs"]
    assert len(parts["steps"]) == 2
    assert all("sdpa_us" in row for row in parts["speed"] if row["kernel"] == "decode attention")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so():
    done = run()
    assert done.returncode == 2
    assert done.stderr.endswith(f"torch finds no GPU; to run the same code on a CPU: {sys.executable} {CHECK} --dry\n")
