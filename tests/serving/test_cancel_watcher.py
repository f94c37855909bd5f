"""The thread that notices who left: what it costs does not grow with the number of streams."""

import threading
import time
from collections.abc import Iterator

import pytest

from kvloom.serving import cancel_watcher
from kvloom.serving.cancel_watcher import MAX_LOOKS, CancelWatcher
from support.waiting import wait_until


class Stream:
    """Stands for a ``Sender``, and counts the looks at it."""

    def __init__(self, looks: "list[Stream] | None" = None):
        self.closed = self.left = self.gone = False
        self._looks = [] if looks is None else looks

    def cancelled(self) -> bool:
        assert not self.closed, "is_cancelled() after the final mark ends tritonserver"
        self._looks.append(self)
        self.left = self.left or self.gone
        return self.left


@pytest.fixture
def watcher() -> Iterator[CancelWatcher]:
    made = CancelWatcher()
    yield made
    made.stop()


def test_a_thousand_streams_cost_no_more_than_a_hundred(watcher):
    looks: list[Stream] = []
    began = time.monotonic()
    for _ in range(1088):
        watcher.watch(Stream(looks), lambda: None)
    wait_until(lambda: len(looks) > 4 * MAX_LOOKS)
    rounds = (time.monotonic() - began) / cancel_watcher.CANCEL_POLL_S
    assert len(looks) <= MAX_LOOKS * (rounds + 1)


def test_each_of_many_streams_has_its_turn(watcher, monkeypatch):
    monkeypatch.setattr(cancel_watcher, "CANCEL_POLL_S", 0.001)
    looks: list[Stream] = []
    streams = [Stream(looks) for _ in range(5 * MAX_LOOKS // 2)]
    for stream in streams:
        watcher.watch(stream, lambda: None)
    wait_until(lambda: len(looks) >= 4 * len(streams))
    for lap in range(1, 3):
        assert set(looks[lap * len(streams) : (lap + 1) * len(streams)]) == set(streams)


def test_few_streams_are_looked_at_in_every_round(watcher, monkeypatch):
    monkeypatch.setattr(cancel_watcher, "CANCEL_POLL_S", 0.001)
    looks: list[Stream] = []
    streams = [Stream(looks) for _ in range(5)]
    for stream in streams:
        watcher.watch(stream, lambda: None)
    wait_until(lambda: len(looks) >= 50)
    seen = looks[:50]
    assert seen[-10:-5] == seen[-5:] and set(seen[-5:]) == set(streams)


def test_who_leaves_among_many_is_noticed_once(watcher, monkeypatch):
    monkeypatch.setattr(cancel_watcher, "CANCEL_POLL_S", 0.001)
    heard: list[Stream] = []
    streams = [Stream() for _ in range(3 * MAX_LOOKS)]
    for stream in streams:
        watcher.watch(stream, lambda stream=stream: heard.append(stream))
    gone = streams[:: MAX_LOOKS // 2]
    for stream in gone:
        stream.gone = True
    wait_until(lambda: len(heard) >= len(gone))
    assert sorted(map(id, heard)) == sorted(map(id, gone))


def test_an_answer_that_is_over_is_not_looked_at_and_takes_nobodys_turn(watcher, monkeypatch):
    monkeypatch.setattr(cancel_watcher, "CANCEL_POLL_S", 0.001)
    for _ in range(20 * MAX_LOOKS):
        over = Stream()
        over.closed = True
        watcher.watch(over, lambda: None)
    noticed = threading.Event()
    last = Stream()
    last.gone = True
    watcher.watch(last, noticed.set)
    assert noticed.wait(60)
    wait_until(lambda: not watcher._watched)
