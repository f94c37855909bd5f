"""The metrics' life: Triton's stub crashes over what is freed after it."""

import importlib
import sys
import weakref
from types import SimpleNamespace

from kvloom.engine import Stats

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
