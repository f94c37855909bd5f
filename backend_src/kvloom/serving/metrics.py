"""Exports the engine's statistics on tritonserver's /metrics."""

import logging
import threading

import triton_python_backend_utils as pb_utils

from kvloom.engine.stats import Stats
from kvloom.engine.thread import EngineThread
from kvloom.faults import logged
from kvloom.serving.metric_families import FAMILIES

log = logging.getLogger(__name__)

PERIOD_S = 0.2
"""Seconds between updates. Each increment takes about 20 microseconds, too much for the engine thread."""

OBSERVATIONS = 4000
"""At most so many observations are copied per update, so that gauges stay current even with a fast model."""

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
_COUNTS = [2.0**power for power in range(14)]

_OBSERVED = {observed: own.name for own in FAMILIES if own.kind == "histogram" for observed in own.figures.values()}


class Metrics:
    """Copies the engine thread's snapshots and observations to Triton's metrics, in a thread of its own."""

    def __init__(self, engine_thread: EngineThread, model: str):
        """Start the thread. ``model`` is the name of the engine's model in Triton."""
        self._engine_thread = engine_thread
        # All engines of a tritonserver share its metrics. The default one needs no label
        self._model = {} if model == "llm" else {"model": model}
        self._seen = Stats()
        # These dicts hold the only references, so that stop() frees the families and metrics
        self._families = {
            own.name: pb_utils.MetricFamily(
                name=own.name, description=own.about, kind=getattr(pb_utils.MetricFamily, own.kind.upper())
            )
            for own in FAMILIES
        }
        self._metrics: dict[tuple[str, ...], pb_utils.Metric] = {}
        # Exported from the start, although no policy evicts blocks yet
        self._metric("kvloom_evicted_blocks_total", policy="full")
        for name in _OBSERVED.values():
            self._metric(name)
        self._update(engine_thread.stats)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and free the metrics. Triton's stub crashes if they are freed after it."""
        self._stop.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        pause = PERIOD_S
        while not self._stop.wait(pause):
            pause = PERIOD_S
            with logged(log, "could not update the metrics"):
                stats = self._engine_thread.stats
                if stats is not self._seen:
                    self._update(stats)
                observed = self._engine_thread.observations.drain(OBSERVATIONS)
                for name, value in observed:
                    self._metric(_OBSERVED[name]).observe(value)
                pause = PERIOD_S if len(observed) < OBSERVATIONS else 0

    def _update(self, stats: Stats) -> None:
        seen, self._seen = self._seen, stats
        for own in FAMILIES:
            for value, figure in own.figures.items():
                labels = {own.label: value} if own.label else {}
                if own.kind == "gauge":
                    self._metric(own.name, **labels).set(getattr(stats, figure))
                elif own.kind == "counter":
                    self._metric(own.name, **labels).increment(getattr(stats, figure) - getattr(seen, figure))
        for reason, count in stats.finished.items():
            finished = self._metric("kvloom_requests_finished_total", reason=reason)
            finished.increment(count - seen.finished.get(reason, 0))

    def _metric(self, family: str, **labels: str) -> "pb_utils.Metric":
        key = (family, *labels.values())
        if key not in self._metrics:
            buckets = {}
            if family in _OBSERVED.values():
                buckets["buckets"] = _SECONDS if family.endswith("_seconds") else _COUNTS
            self._metrics[key] = self._families[family].Metric(labels=labels | self._model, **buckets)
        return self._metrics[key]
