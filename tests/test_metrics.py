"""The metrics' life: Triton's stub crashes over what is freed after it."""

import importlib
import sys
import weakref
from types import SimpleNamespace

from kvloom.engine import Stats


class Family:
    """A stand-in for ``pb_utils.MetricFamily``."""

    GAUGE = COUNTER = HISTOGRAM = "kind"
    live: "weakref.WeakSet[Family]" = weakref.WeakSet()

    def __init__(self, **_: object):
        self.live.add(self)

    def Metric(self, **_: object) -> SimpleNamespace:  # noqa: N802 Triton's name
        def ignore(value: float) -> None:
            """Take a value."""

        return SimpleNamespace(set=ignore, increment=ignore, observe=ignore)


def test_nobody_holds_a_family_after_the_stop(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", SimpleNamespace(MetricFamily=Family))
    monkeypatch.delitem(sys.modules, "kvloom.serving.metrics", raising=False)
    try:
        module = importlib.import_module("kvloom.serving.metrics")
        metrics = module.Metrics(SimpleNamespace(stats=Stats(finished={"stop": 1})))
        assert len(Family.live) == len(module.FAMILIES)
        metrics.stop()
        assert list(Family.live) == []
    finally:
        sys.modules.pop("kvloom.serving.metrics", None)
