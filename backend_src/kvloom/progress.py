"""Logs the progress of a start. The launcher shows these log lines to the user."""

import logging
import time

log = logging.getLogger(__name__)

PARTS = 10
LEAST_S = 1.0
"""Least seconds between two lines about the same phase."""


def phase(text: str) -> None:
    """Log the beginning of a phase, like "loading the model"."""
    log.info("%s", text)


class Progress:
    """Logs the progress of a phase: one line for every tenth, but at most one line per second."""

    def __init__(self, what: str, total: int, unit: str):
        """Begin.

        Args:
            what: the phase.
            total: the amount of work, in bytes or another unit.
            unit: the unit of a million of them, such as "MB".
        """
        self._what = what
        self._total = total
        self._unit = unit
        self._part = 0
        self._said_at = time.monotonic()

    def at(self, done: int) -> None:
        """Report that ``done`` of the total is done."""
        # More than the total may be reported, because pip has a wheel twice for a moment
        done = min(done, self._total)
        part, now = done * PARTS // self._total, time.monotonic()
        if part > self._part and now - self._said_at >= LEAST_S:
            self._part, self._said_at = part, now
            phase(f"{self._what}: {done / 1e6:.0f} of {self._total / 1e6:.0f} {self._unit}")
