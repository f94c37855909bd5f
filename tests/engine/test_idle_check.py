"""An engine that has nothing to do is checked, and nobody waits for that."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvloom.engine import idle_check
from kvloom.engine.engine import Engine
from kvloom.engine.thread import EngineThread
from support.engine_driver import Driver
from support.tiny_models import make_tiny
from support.waiting import submit


class Checks:
    """Counts the checks of an engine, and what they look at."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch):
        self.begun, self.ended = 0, threading.Event()
        self._check = engine.check_in_parts
        monkeypatch.setattr(engine, "check_in_parts", self._counted)

    def _counted(self) -> Iterator[None]:
        self.begun += 1
        yield from self._check()
        self.ended.set()


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    return Driver(make_tiny(tmp_path / "model"), kv_blocks=4096).engine


@pytest.fixture
def checks(engine, monkeypatch) -> Checks:
    return Checks(engine, monkeypatch)


@pytest.fixture
def engine_thread(engine, checks) -> Iterator[EngineThread]:
    running = EngineThread(lambda: engine)
    yield running
    running.stop()


def ask(engine_thread: EngineThread) -> None:
    assert submit(engine_thread, [5, 6, 7], max_tokens=3)[1].wait(60)


def test_an_engine_is_checked_only_when_it_is_quiet(engine_thread, checks, monkeypatch):
    monkeypatch.setattr(idle_check, "QUIET_S", 3600.0)
    # each answer leaves the engine idle
    for _ in range(5):
        ask(engine_thread)
    assert checks.begun == 0
    monkeypatch.setattr(idle_check, "QUIET_S", 0.0)
    ask(engine_thread)
    assert checks.ended.wait(60)


def test_a_request_does_not_wait_for_the_rest_of_a_check(engine, monkeypatch):
    monkeypatch.setattr(idle_check, "QUIET_S", 0.0)
    begun = threading.Event()

    def endless() -> Iterator[None]:
        while True:
            begun.set()
            yield

    monkeypatch.setattr(engine, "check_in_parts", endless)
    engine_thread = EngineThread(lambda: engine)
    for _ in range(3):
        begun.clear()
        ask(engine_thread)
        assert begun.wait(60)
    engine_thread.stop()


def test_what_changes_between_two_parts_of_a_check_is_no_fault(engine_thread, checks, monkeypatch, caplog):
    """A check that went on over a change would take it for a leak."""
    monkeypatch.setattr(idle_check, "QUIET_S", 0.0)
    for _ in range(8):
        ask(engine_thread)
    assert checks.ended.wait(60)
    assert checks.begun > 1
    assert not caplog.records


def test_a_part_of_a_check_is_short(engine):
    """However large the pool is: it looks at each block twice."""
    parts = sum(1 for _ in engine.check_in_parts())
    assert parts >= 2 * 4096 / 1024


def test_a_leak_is_told_of_when_it_is_quiet(engine_thread, engine, monkeypatch, caplog):
    monkeypatch.setattr(idle_check, "QUIET_S", 0.0)
    told = threading.Event()
    recover = engine.recover
    monkeypatch.setattr(engine, "recover", lambda error: (recover(error), told.set()))
    release = engine._cache.release

    def leak(table: list[int]) -> None:
        engine._cache._tables[table[0]] += 1
        release(table)

    monkeypatch.setattr(engine._cache, "release", leak)
    ask(engine_thread)
    assert told.wait(60)
    assert "the engine failed outside a step" in caplog.text
