"""Faults that concern one of many."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(log: logging.Logger, what: str, *arguments: object) -> Iterator[None]:
    """Log a fault, and go on with the others, who must not suffer from it.

    Args:
        log: where to.
        what: is told of it, with ``arguments`` as of ``log.error``.
    """
    try:
        yield
    except Exception:  # noqa: BLE001 whatever it is
        log.exception(what, *arguments)
