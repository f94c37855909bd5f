"""Prints the progress of a load test."""

import sys
import time
from typing import Any

from kvloom_load.drive import LoadPlan

SERVER_S = 14
"""Approximate seconds to start and stop a server with the default model."""

POINT_S = 8
"""Approximate seconds of a point besides the time in which users start requests: Locust's start, the last answers."""


class Progress:
    """Prints a line on stderr at the beginning and after each point. A point is one number of users on one server."""

    def __init__(self, plan: LoadPlan, counts: list[int], configurations: int):
        """Print how long the test will take."""
        self._points = len(counts) * configurations
        self._finished = 0
        self._began = time.monotonic()
        expected = configurations * SERVER_S + self._points * (plan.seconds + POINT_S)
        servers = f"{configurations} server{'s' if configurations > 1 else ''}"
        _say(
            f"{plan.scenario}, {plan.user}: {servers}, {', '.join(map(_users, counts))}, {plan.seconds} s each: about "
            f"{_time(expected)}; slow last answers take up to {plan.stop_timeout} s more each time"
        )

    def finished(self, row: dict[str, Any]) -> None:
        """Print the figures of a finished point."""
        self._finished += 1
        passed = time.monotonic() - self._began
        ttft = "no answer" if row["ttft_ms"] is None else f"TTFT {row['ttft_ms']['p50']:.0f} ms"
        failed = f", {row['failed']} failed" if row["failed"] else ""
        point = f"{row['configuration']}, {_users(row['users'])}"
        _say(
            f"{self._finished} of {self._points} after {_time(passed)}: {point}: "
            f"{row['tokens_per_s']:.1f} tokens/s, {ttft}{failed}"
        )


def _users(count: int) -> str:
    return f"{count} user{'s' if count > 1 else ''}"


def _time(seconds: float) -> str:
    return f"{seconds // 60:.0f} min {seconds % 60:02.0f} s" if seconds >= 60 else f"{seconds:.0f} s"


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
