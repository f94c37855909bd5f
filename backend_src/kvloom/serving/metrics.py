"""The engine's figures on tritonserver's /metrics."""

import logging
import threading

import triton_python_backend_utils as pb_utils

from kvloom.engine.engine import Stats
from kvloom.engine.thread import Loop
from kvloom.faults import logged

log = logging.getLogger(__name__)

PERIOD_S = 0.2
"""Seconds between updates: an increment costs about 20 microseconds, too much for the loop's own thread."""

OBSERVATIONS = 4000
"""The most that an update copies, so that gauges stay new where a fast model makes more than can be copied at once."""

_SECONDS = [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300]
_COUNTS = [2.0**power for power in range(14)]

FAMILIES = {
    "kvloom_requests_running": ("GAUGE", "Requests in the running batch"),
    "kvloom_requests_waiting": ("GAUGE", "Requests waiting for admission"),
    "kvloom_conversations": ("GAUGE", "Conversations that keep their cache"),
    "kvloom_blocks": ("GAUGE", "Blocks of the KV cache by state"),
    "kvloom_prefix_tokens_queried_total": ("COUNTER", "Prompt tokens that were looked for in the prefix cache"),
    "kvloom_prefix_tokens_hit_total": ("COUNTER", "Prompt tokens that were found in the prefix cache"),
    "kvloom_preemptions_total": ("COUNTER", "Preempted sequences by mode"),
    "kvloom_evicted_blocks_total": ("COUNTER", "Blocks dropped by the eviction policy"),
    "kvloom_tokens_total": ("COUNTER", "Tokens by kind"),
    "kvloom_requests_finished_total": ("COUNTER", "Finished requests by reason"),
    "kvloom_ttft_seconds": ("HISTOGRAM", "Time from arrival to the first token"),
    "kvloom_inter_token_seconds": ("HISTOGRAM", "Time between two tokens of an answer"),
    "kvloom_e2e_seconds": ("HISTOGRAM", "Time from arrival to the end of the answer"),
    "kvloom_queue_seconds": ("HISTOGRAM", "Time from arrival to the first step"),
    "kvloom_step_seconds": ("HISTOGRAM", "Time of a step"),
    "kvloom_step_tokens": ("HISTOGRAM", "Tokens computed in a step"),
    "kvloom_step_sequences": ("HISTOGRAM", "Sequences in a step"),
}
"""Kind and description of each family of metrics."""

GAUGES: dict[str, tuple[str, dict[str, str]]] = {
    "running": ("kvloom_requests_running", {}),
    "waiting": ("kvloom_requests_waiting", {}),
    "conversations": ("kvloom_conversations", {}),
    "blocks_free": ("kvloom_blocks", {"state": "free"}),
    "blocks_used": ("kvloom_blocks", {"state": "used"}),
    "blocks_cached": ("kvloom_blocks", {"state": "cached"}),
    "blocks_swapped": ("kvloom_blocks", {"state": "swapped"}),
}
"""What each figure of ``Stats`` is shown as: a family and labels."""

COUNTERS: dict[str, tuple[str, dict[str, str]]] = {
    "swaps": ("kvloom_preemptions_total", {"mode": "swap"}),
    "recomputes": ("kvloom_preemptions_total", {"mode": "recompute"}),
    "prefix_queried": ("kvloom_prefix_tokens_queried_total", {}),
    "prefix_hit": ("kvloom_prefix_tokens_hit_total", {}),
    "prompt_tokens": ("kvloom_tokens_total", {"kind": "prompt"}),
    "generated_tokens": ("kvloom_tokens_total", {"kind": "generated"}),
}
"""Likewise; these only grow."""


class Metrics:
    """Copies the loop's snapshots and observations to Triton's metrics, from a thread of its own."""

    def __init__(self, loop: Loop, model: str):
        """Begin to copy; ``model`` is the engine's name in Triton."""
        self._loop = loop
        # the engines of one tritonserver share its metrics; the usual one needs no label
        self._model = {} if model == "llm" else {"model": model}
        self._seen = Stats()
        # these hold the only references, so that stop() frees families and metrics
        self._families = {
            name: pb_utils.MetricFamily(name=name, description=description, kind=getattr(pb_utils.MetricFamily, kind))
            for name, (kind, description) in FAMILIES.items()
        }
        self._metrics: dict[tuple[str, ...], pb_utils.Metric] = {}
        # shown from the start, though nothing moves it yet: no policy drops blocks
        self._metric("kvloom_evicted_blocks_total", policy="full")
        for name, (kind, _) in FAMILIES.items():
            if kind == "HISTOGRAM":
                self._metric(name)
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
        pause = PERIOD_S
        while not self._stop.wait(pause):
            pause = PERIOD_S
            with logged(log, "metrics could not be copied"):
                stats = self._loop.stats
                if stats is not self._seen:
                    self._update(stats)
                observed = self._loop.observations.drain(OBSERVATIONS)
                for name, value in observed:
                    self._metric(f"kvloom_{name}").observe(value)
                pause = PERIOD_S if len(observed) < OBSERVATIONS else 0

    def _update(self, stats: Stats) -> None:
        seen, self._seen = self._seen, stats
        for name, (family, labels) in GAUGES.items():
            self._metric(family, **labels).set(getattr(stats, name))
        for name, (family, labels) in COUNTERS.items():
            self._metric(family, **labels).increment(getattr(stats, name) - getattr(seen, name))
        for reason, count in stats.finished.items():
            finished = self._metric("kvloom_requests_finished_total", reason=reason)
            finished.increment(count - seen.finished.get(reason, 0))

    def _metric(self, family: str, **labels: str) -> "pb_utils.Metric":
        key = (family, *labels.values())
        if key not in self._metrics:
            buckets = {}
            if FAMILIES[family][0] == "HISTOGRAM":
                buckets["buckets"] = _SECONDS if family.endswith("_seconds") else _COUNTS
            self._metrics[key] = self._families[family].Metric(labels=labels | self._model, **buckets)
        return self._metrics[key]
