"""The stacks that tritonserver's threads get."""

import resource
import subprocess
import sys

import pytest

from kvloom.launcher.stacks import STACK

SEEN = """
import resource, subprocess, sys
from kvloom.launcher.stacks import deep_stacks
before = resource.getrlimit(resource.RLIMIT_STACK)
with deep_stacks():
    print(subprocess.check_output(["/bin/sh", "-c", "ulimit -s"], text=True).strip())
assert resource.getrlimit(resource.RLIMIT_STACK) == before
"""


def size_under(limits: str) -> str:
    """The stack in KiB of a child that starts with deep stacks, where the starting shell sets these limits."""
    command = ["/bin/sh", "-c", f'{limits} exec "$@"', "sh", sys.executable, "-c", SEEN]
    return subprocess.check_output(command, text=True, timeout=60).strip()


@pytest.mark.skipif(resource.getrlimit(resource.RLIMIT_STACK)[1] != -1, reason="the stack of this shell is limited")
@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ("ulimit -S -s 8192;", STACK // 1024),
        # glibc would give threads 2 MiB
        ("ulimit -S -s unlimited;", STACK // 1024),
        ("ulimit -S -s 1048576;", 1048576),
        ("ulimit -s 65536;", 65536),
        ("ulimit -S -s 8192; ulimit -v 33554432;", 8192),
    ],
)
def test_stacks_are_as_deep_as_permitted(limits, expected):
    assert size_under(limits) == str(expected)
