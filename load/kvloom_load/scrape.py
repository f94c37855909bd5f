"""Reads the server's Prometheus metrics and Triton's statistics of its models."""

import json
import threading
import time
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

PERIOD_S = 0.5
"""Seconds between two reads of the metrics. The engine updates them every 0.2 s."""

TIMEOUT_S = 10

Sample = tuple[str, frozenset[tuple[str, str]]]
"""The name and labels of one line of the metrics."""


@dataclass(frozen=True)
class Metrics:
    """kvloom's metrics at one time, or the difference between two times."""

    values: Mapping[Sample, float] = field(default_factory=dict)

    @classmethod
    def read(cls, url: str) -> "Metrics":
        """Read the metrics from the server."""
        return cls.parse(_get(url))

    @classmethod
    def parse(cls, text: str) -> "Metrics":
        """Parse Prometheus's text format."""
        return cls(
            {
                (sample.name, frozenset(sample.labels.items())): sample.value
                for family in text_string_to_metric_families(text)
                for sample in family.samples
                if sample.name.startswith("kvloom_")
            }
        )

    def since(self, before: "Metrics") -> "Metrics":
        """The increase of counters and histograms since ``before``."""
        return Metrics({sample: value - before.values.get(sample, 0.0) for sample, value in self.values.items()})

    def value(self, name: str, **labels: str) -> float:
        """One value; 0 if the server does not have it."""
        return self.values.get((name, frozenset(labels.items())), 0.0)

    def mean(self, histogram: str) -> float | None:
        """The mean of a histogram's values; None if it has none."""
        count = self.value(f"{histogram}_count")
        return self.value(f"{histogram}_sum") / count if count else None

    def buckets(self, histogram: str) -> list[tuple[float, float]]:
        """A histogram's buckets that are not empty, as pairs of upper bound (inclusive) and number of values."""
        bounds = sorted(
            (float(dict(labels)["le"]), value)
            for (name, labels), value in self.values.items()
            if name == f"{histogram}_bucket"
        )
        below = [0.0, *(value for _, value in bounds)]
        return [(bound, value - less) for (bound, value), less in zip(bounds, below, strict=False) if value > less]


class Watch:
    """A context manager that reads the metrics periodically in a thread.

    Attributes:
        seen: pairs of time (``time.monotonic()``) and metrics, in order.
    """

    def __init__(self, url: str):
        self.seen: list[tuple[float, Metrics]] = []
        self._url = url
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> "Watch":
        self._settle()
        self._look()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()
        self._settle()
        self._look()

    def between(self, begin: float, end: float) -> Metrics:
        """The increase of the metrics between the reads that are nearest to these two times."""

        def at(moment: float) -> Metrics:
            return min(self.seen, key=lambda look: abs(look[0] - moment))[1]

        return at(end).since(at(begin))

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            # If the server does not answer in time, this read is left out
            try:
                self._look()
            except OSError:
                continue

    def _settle(self) -> None:
        """Wait until the metrics contain the engine's last work."""
        time.sleep(PERIOD_S)

    def _look(self) -> None:
        self.seen.append((time.monotonic(), Metrics.read(self._url)))


@dataclass(frozen=True)
class TritonStats:
    """Triton's own statistics of one model.

    Attributes:
        batches: for each batch size, how often Triton passed such a batch to the model's execute(). The engine forms
            different batches, which are in its metrics.
        requests: number of requests.
        queue_s: total seconds that they waited in Triton's queue.
    """

    batches: Mapping[int, int]
    requests: int
    queue_s: float

    @classmethod
    def read(cls, http_url: str, model: str) -> "TritonStats":
        """Read a model's statistics from Triton."""
        stats: dict[str, Any] = json.loads(_get(f"{http_url}/v2/models/{model}/stats"))["model_stats"][0]
        batches = {int(batch["batch_size"]): int(batch["compute_infer"]["count"]) for batch in stats["batch_stats"]}
        queue = stats["inference_stats"]["queue"]
        return cls(batches, int(queue["count"]), int(queue["ns"]) / 1e9)

    def since(self, before: "TritonStats") -> "TritonStats":
        """The increase since ``before``."""
        batches = {size: count - before.batches.get(size, 0) for size, count in sorted(self.batches.items())}
        return TritonStats(
            {size: count for size, count in batches.items() if count},
            self.requests - before.requests,
            self.queue_s - before.queue_s,
        )


def _get(url: str) -> str:
    # No proxy from the environment
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=TIMEOUT_S) as response:
        text: str = response.read().decode()
    return text
