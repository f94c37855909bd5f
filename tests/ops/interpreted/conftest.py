"""What every file here needs: triton's interpreter, right about bfloat16, and ops that launch Triton kernels."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvloom.ops.gpu import use_triton_everywhere

# helpers that the tests outside use too
sys.path.append(str(Path(__file__).parents[2]))


def pytest_configure() -> None:
    assert os.environ.get("TRITON_INTERPRET") == "1", "tests/ops/test_interpreted.py runs these files"
    # imports triton, which reads the variable
    import bfloat16

    bfloat16.teach_interpreter()


@pytest.fixture(autouse=True)
def _triton_kernels() -> Iterator[None]:
    torch.manual_seed(1)
    use_triton_everywhere(True)
    yield
    use_triton_everywhere(False)
