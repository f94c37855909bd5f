"""What a start is doing: lines of the log that the launcher shows to whoever waits for it."""

import logging
import time

log = logging.getLogger(__name__)

PARTS = 10
LEAST_S = 1.0
"""Between two lines about the same phase."""


def phase(text: str) -> None:
    """Log what begins to be done, like "loading the model"."""
    log.info("%s", text)


class Progress:
    """How far a phase is: one line whenever another tenth of it is done, at most one a second."""

    def __init__(self, what: str, total: int, unit: str):
        """Begin.

        Args:
            what: the phase.
            total: what there is to do, in bytes or the like.
            unit: of the numbers shown, which are millions: "MB" where ``total`` is bytes.
        """
        self._what = what
        self._total = total
        self._unit = unit
        self._part = 0
        self._said_at = time.monotonic()

    def at(self, done: int) -> None:
        """So much is done."""
        # pip holds a wheel twice for a moment
        done = min(done, self._total)
        part, now = done * PARTS // self._total, time.monotonic()
        if part > self._part and now - self._said_at >= LEAST_S:
            self._part, self._said_at = part, now
            phase(f"{self._what}: {done / 1e6:.0f} of {self._total / 1e6:.0f} {self._unit}")
