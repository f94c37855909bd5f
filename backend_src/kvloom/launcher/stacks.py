"""The stack of tritonserver's threads."""

import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

STACK = 512 * 2**20
"""Bytes of a thread's stack. Triton parses the JSON of an HTTP request by recursion, which takes about 300 bytes for
each level, and crashes at the end of the stack: with the usual 8 MiB, at a body of 50 kB. This size is address space
until a request needs it. A larger one would let clients occupy more memory for good, because a stack never shrinks."""

_OVERCOMMIT = Path("/proc/sys/vm/overcommit_memory")
_NEVER = "2"
"""The kernel's setting by which every address must be backed by memory."""


@contextmanager
def deep_stacks() -> Iterator[None]:
    """Give the threads of processes that start within this context stacks of ``STACK``, as far as that is permitted."""
    soft, hard = before = resource.getrlimit(resource.RLIMIT_STACK)
    if not _affordable():
        yield
        return
    size = STACK if hard == resource.RLIM_INFINITY else min(STACK, hard)
    # An unlimited stack means 2 MiB for every thread but the first
    if soft == resource.RLIM_INFINITY or soft < size:
        resource.setrlimit(resource.RLIMIT_STACK, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_STACK, before)


def _affordable() -> bool:
    limited = resource.getrlimit(resource.RLIMIT_AS)[0] != resource.RLIM_INFINITY
    return not limited and _OVERCOMMIT.read_text().strip() != _NEVER
