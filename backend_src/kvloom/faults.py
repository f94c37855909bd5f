"""Logs faults that must not affect other requests."""

import logging
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def logged(log: logging.Logger, what: str, *arguments: object) -> Iterator[None]:
    """Run a block. If it raises, log the exception and continue.

    Args:
        log: the logger.
        what: the message, with ``arguments`` as in ``log.error``.
    """
    try:
        yield
    except Exception:  # noqa: BLE001 no fault of the block may affect other requests
        log.exception(what, *arguments)
