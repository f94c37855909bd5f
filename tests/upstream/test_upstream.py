"""The faults of Triton that kvloom goes around are still there."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.launcher import tritonserver


@pytest.mark.slow
@pytest.mark.parametrize("script", ["strict_stream"])
def test_triton_still_has_the_fault(script, tmp_path):
    found = tritonserver.find(None, tmp_path)
    ran = subprocess.run(
        [sys.executable, Path(__file__).with_name(f"{script}.py"), found.binary, found.backends],
        env=found.environment(os.environ),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert "the stream has ended: StatusCode." in ran.stdout, ran.stdout + ran.stderr
    assert ran.returncode == 1 and "tritonserver has ended with" in ran.stdout, "kvloom's way around the fault can go"
