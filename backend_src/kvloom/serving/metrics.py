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
        # held nowhere else, so that stop() frees them
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind))
            for name, (kind, description) in FAMILIES.items()
        }
        self._running = self._metric("kvloom_requests_running")
        self._waiting = self._metric("kvloom_requests_waiting")
        self._free = self._metric("kvloom_blocks", state="free")
        self._used = self._metric("kvloom_blocks", state="used")
        self._recomputed = self._metric("kvloom_preemptions_total", mode="recompute")
        self._prompt = self._metric("kvloom_tokens_total", kind="prompt")
        self._generated = self._metric("kvloom_tokens_total", kind="generated")
        self._by_reason: dict[str, pb_utils.Metric] = {}
        self._update(loop.stats)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread and take the metrics away; Triton's stub crashes over those that are freed after it."""
        self._stop.set()
        self._thread.join()
        # a family clears its metrics, whoever still holds them
        self._families.clear()

    def _run(self) -> None:
        while not self._stop.wait(PERIOD_S):
            stats = self._loop.stats
            if stats is not self._seen:
                self._update(stats)

    def _update(self, stats: Stats) -> None:
        seen, self._seen = self._seen, stats
        self._running.set(stats.running)
        self._waiting.set(stats.waiting)
        self._free.set(stats.blocks_free)
        self._used.set(stats.blocks_used)
        self._recomputed.increment(stats.preemptions - seen.preemptions)
        self._prompt.increment(stats.prompt_tokens - seen.prompt_tokens)
        self._generated.increment(stats.generated_tokens - seen.generated_tokens)
        for reason, count in stats.finished.items():
            if reason not in self._by_reason:
                self._by_reason[reason] = self._metric("kvloom_requests_finished_total", reason=reason)
            self._by_reason[reason].increment(count - seen.finished.get(reason, 0))

    def _metric(self, family: str, **labels: str) -> "pb_utils.Metric":
        return self._families[family].Metric(labels=labels)
