"""Passes measured values from the engine to the histograms."""

from collections import deque
from typing import Literal

Name = Literal[
    "ttft_seconds",
    "inter_token_seconds",
    "e2e_seconds",
    "queue_seconds",
    "step_seconds",
    "step_tokens",
    "step_sequences",
]


class Observations:
    """A bounded queue. The engine fills it and one other thread drains it. The oldest values are dropped if full."""

    def __init__(self, max_values: int = 1_000_000):
        self._values: deque[tuple[Name, float]] = deque(maxlen=max_values)

    def add(self, name: Name, value: float) -> None:
        """Add a value."""
        self._values.append((name, value))

    def drain(self, max_values: int | None = None) -> list[tuple[Name, float]]:
        """Remove and return the oldest values in order, at most ``max_values`` of them; None: all."""
        count = len(self._values) if max_values is None else min(max_values, len(self._values))
        return [self._values.popleft() for _ in range(count)]
