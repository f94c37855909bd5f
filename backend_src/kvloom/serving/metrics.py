"""The engine's figures on tritonserver's /metrics."""

import threading

import triton_python_backend_utils as pb_utils

from kvloom.engine import Stats
from kvloom.loop import Loop

PERIOD_S = 0.2
"""Seconds between updates: an increment costs about 20 microseconds, too much for the loop's own thread."""

FAMILIES = {
    "kvloom_requests_running": ("GAUGE", "Requests in the running batch"),
    "kvloom_requests_waiting": ("GAUGE", "Requests waiting for admission"),
    "kvloom_blocks": ("GAUGE", "Blocks of the KV cache by state"),
    "kvloom_preemptions_total": ("COUNTER", "Preempted sequences by mode"),
    "kvloom_tokens_total": ("COUNTER", "Tokens by kind"),
    "kvloom_requests_finished_total": ("COUNTER", "Finished requests by reason"),
}
"""Kind and description of each family of metrics."""


class Metrics:
    """Copies the loop's snapshots to Triton's metrics from a thread of its own."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._seen = Stats()
        # these hold the only references, so that stop() frees families and metrics
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind))
            for name, (kind, description) in FAMILIES.items()
        }
        self._metrics: dict[tuple[str, ...], pb_utils.Metric] = {}
        self._update(loop.stats)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and take the metrics away; Triton's stub crashes over those that are freed after it."""
        self._stop.set()
        self._thread.join()
        self._metrics.clear()
        self._families.clear()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            stats = self._loop.stats
            if stats is not self._seen:
                self._update(stats)

    def _update(self, stats: Stats) -> None:
        seen, self._seen = self._seen, stats
        self._metric("kvloom_requests_running").set(stats.running)
        self._metric("kvloom_requests_waiting").set(stats.waiting)
        self._metric("kvloom_blocks", state="free").set(stats.blocks_free)
        self._metric("kvloom_blocks", state="used").set(stats.blocks_used)
        self._metric("kvloom_preemptions_total", mode="recompute").increment(stats.preemptions - seen.preemptions)
        self._metric("kvloom_tokens_total", kind="prompt").increment(stats.prompt_tokens - seen.prompt_tokens)
        self._metric("kvloom_tokens_total", kind="generated").increment(stats.generated_tokens - seen.generated_tokens)
        for reason, count in stats.finished.items():
            finished = self._metric("kvloom_requests_finished_total", reason=reason)
            finished.increment(count - seen.finished.get(reason, 0))

    def _metric(self, family: str, **labels: str) -> "pb_utils.Metric":
        key = (family, *labels.values())
        if key not in self._metrics:
            self._metrics[key] = self._families[family].Metric(labels=labels)
        return self._metrics[key]
