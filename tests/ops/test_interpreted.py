"""The Triton kernels under triton's interpreter, without a GPU.

Triton decides at its import whether it interprets, so each file of ``interpreted/`` is a pytest run in a process of its
own. One by hand:

    TRITON_INTERPRET=1 python -m pytest --confcutdir tests/ops/interpreted tests/ops/interpreted/attention.py
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"
HELPERS = ("conftest.py", "bfloat16.py", "tolerance.py")
FILES = sorted(path.name for path in FOLDER.glob("*.py") if path.name not in HELPERS)
LONG = ("attention.py", "engine.py", "kv_write.py", "linear.py", "sampling.py")
"""Take longest."""


def run(name: str, marks: str) -> None:
    """Run the tests of a file in ``interpreted/`` that have these marks; its output is what a failure shows."""
    # one thread: the interpreter's products are tiny, and other tests share the machine
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    # without tests/conftest.py, which imports servers and clients
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--confcutdir", str(FOLDER)]
    done = subprocess.run(
        [*command, "-m", marks, str(FOLDER / name)], env=environment, capture_output=True, text=True, check=False
    )
    print(done.stdout)
    nothing_of_these_marks = 5
    assert done.returncode in (0, nothing_of_these_marks) if marks == "full" else done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in LONG else []) for name in FILES]
)
def test_kernels(name):
    run(name, "not full")


@pytest.mark.full
@pytest.mark.parametrize("name", FILES)
def test_kernels_at_full_length(name):
    run(name, "full")
