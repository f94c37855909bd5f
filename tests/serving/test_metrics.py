"""Which metrics there are, and their life: Triton's stub crashes over what is freed after it."""

import importlib
import re
import sys
import weakref
from types import SimpleNamespace

from kvloom.engine.engine import Stats
from support.readmes import table

TYPES = {
    "kvloom_requests_running": "gauge",
    "kvloom_requests_waiting": "gauge",
    "kvloom_conversations": "gauge",
    "kvloom_blocks": "gauge",
    "kvloom_prefix_tokens_queried_total": "counter",
    "kvloom_prefix_tokens_hit_total": "counter",
    "kvloom_preemptions_total": "counter",
    "kvloom_evicted_blocks_total": "counter",
    "kvloom_tokens_total": "counter",
    "kvloom_requests_finished_total": "counter",
    "kvloom_ttft_seconds": "histogram",
    "kvloom_inter_token_seconds": "histogram",
    "kvloom_e2e_seconds": "histogram",
    "kvloom_queue_seconds": "histogram",
    "kvloom_step_seconds": "histogram",
    "kvloom_step_tokens": "histogram",
    "kvloom_step_sequences": "histogram",
}
"""Every metric's."""

LIVE: "weakref.WeakSet[object]" = weakref.WeakSet()


class Metric:
    """A stand-in for ``pb_utils.Metric``."""

    def __init__(self, **_: object):
        LIVE.add(self)

    def set(self, value: float) -> None:
        """Take a value."""

    increment = observe = set


class Family:
    """A stand-in for ``pb_utils.MetricFamily``."""

    GAUGE = COUNTER = HISTOGRAM = "kind"
    Metric = Metric

    def __init__(self, **_: object):
        LIVE.add(self)


def test_nobody_holds_a_family_or_a_metric_after_the_stop(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=Family))
    monkeypatch.delitem(sys.modules, "kvloom.serving.metrics", raising=False)
    try:
        module = importlib.import_module("kvloom.serving.metrics")
        metrics = module.Metrics(SimpleNamespace(stats=Stats(finished={"stop": 1})))
        assert len(LIVE) > len(module.FAMILIES)
        metrics.stop()
        assert list(LIVE) == []
    finally:
        sys.modules.pop("kvloom.serving.metrics", None)


def test_the_readme_has_every_metric():
    rows = table("metric", "kind", "meaning")
    assert {re.sub(r"[`{].*", "", name.strip("`")): kind for name, kind, _ in rows} == TYPES
