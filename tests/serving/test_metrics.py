"""Which metrics there are, and their life: Triton's stub crashes over what is freed after it."""

import importlib
import re
import sys
import urllib.request
import weakref
from types import SimpleNamespace

from kvloom.engine.stats import Stats
from kvloom.serving.metric_families import FAMILIES
from support.server import eventually, metrics

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
        metrics = module.Metrics(SimpleNamespace(stats=Stats(finished={"stop": 1})), "llm")
        assert len(LIVE) > len(FAMILIES)
        metrics.stop()
        assert list(LIVE) == []
    finally:
        sys.modules.pop("kvloom.serving.metrics", None)


def test_a_server_shows_what_is_declared(server, client):
    client.generate(text_input="Hello", max_tokens=2)
    eventually(lambda: any(name.startswith("kvloom_requests_finished_total{") for name in metrics(server)))
    with urllib.request.urlopen(server.metrics_url, timeout=10) as response:
        text = response.read().decode()
    assert dict(re.findall(r"^# TYPE (kvloom_\w+) (\w+)$", text, re.MULTILINE)) == {o.name: o.kind for o in FAMILIES}
    assert dict(re.findall(r"^# HELP (kvloom_\w+) (.+)$", text, re.MULTILINE)) == {o.name: o.about for o in FAMILIES}
    for own in FAMILIES:
        labels = re.findall(rf'^{own.name}(?:{{(\w+)="(\w+)"}})? ', text, re.MULTILINE)
        if own.kind != "histogram":
            assert {label for label, _ in labels} == {own.label}, own.name
            assert {value for _, value in labels} >= set(own.figures), own.name
