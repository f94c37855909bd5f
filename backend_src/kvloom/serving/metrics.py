"""The engine's figures on tritonserver's /metrics."""

import threading

import triton_python_backend_utils as pb_utils

from kvloom.engine import Stats
from kvloom.loop import Loop

PERIOD_S = 0.2
"""Seconds between updates: an increment costs about 20 microseconds, too much for the loop's own thread."""


class Metrics:
    """Copies the loop's snapshots to Triton's metrics from a thread of its own."""

    def __init__(self, loop: Loop):
        self._loop = loop
        self._seen = Stats()
        gauge, counter = pb_utils.MetricFamily.GAUGE, pb_utils.MetricFamily.COUNTER
        running = _family("kvloom_requests_running", "Requests in the running batch", gauge)
        waiting = _family("kvloom_requests_waiting", "Requests waiting for admission", gauge)
        blocks = _family("kvloom_blocks", "Blocks of the KV cache by state", gauge)
        preemptions = _family("kvloom_preemptions_total", "Preempted sequences by mode", counter)
        tokens = _family("kvloom_tokens_total", "Tokens by kind", counter)
        self._finished = _family("kvloom_requests_finished_total", "Finished requests by reason", counter)
        # a metric dies with its family
        self._families = (running, waiting, blocks, preemptions, tokens)
        self._running = running.Metric(labels={})
        self._waiting = waiting.Metric(labels={})
        self._free = blocks.Metric(labels={"state": "free"})
        self._used = blocks.Metric(labels={"state": "used"})
        self._recomputed = preemptions.Metric(labels={"mode": "recompute"})
        self._prompt = tokens.Metric(labels={"kind": "prompt"})
        self._generated = tokens.Metric(labels={"kind": "generated"})
        self._by_reason: dict[str, pb_utils.Metric] = {}
        self._update(loop.stats)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvloom-metrics", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread."""
        self._stop.set()
        self._thread.join()

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
                self._by_reason[reason] = self._finished.Metric(labels={"reason": reason})
            self._by_reason[reason].increment(count - seen.finished.get(reason, 0))


def _family(name: str, description: str, kind: object) -> "pb_utils.MetricFamily":
    return pb_utils.MetricFamily(name=name, description=description, kind=kind)
