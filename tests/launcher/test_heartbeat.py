"""Signs of life: from a door that says what the test wants, by a clock that the test moves."""

import itertools
import json
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from kvloom.launcher import heartbeat
from kvloom.launcher.heartbeat import Heartbeat

ALIVE = {"op": "ping", "ok": True, "since_step_s": 0.0, "failed_steps": 0, "draining": False}
Says = Callable[[dict[str, Any]], object]


class Clock:
    now = 100.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


@contextmanager
def door(says: Says) -> Iterator[tuple[int, threading.Event]]:
    """The port of something like `generate`; where ``says`` returns None it answers nothing until the event is set."""
    closed = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:  # noqa: N802 - the name is http.server's
            said = says(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            if said is None:
                closed.wait(30)
                return
            content = said if isinstance(said, bytes) else json.dumps(said).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield server.server_address[1], closed
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(heartbeat, "time", clock)
    return clock


def problem(clock: Clock, says: Says, stuck_after_s: float = 3.0, answers: bool = True) -> tuple[str | None, float]:
    """What a heartbeat finds within 20 s, and after how many; ``answers``: whether the door does."""
    with door(says) as (port, closed):
        beat, start = Heartbeat("127.0.0.1", port, stuck_after_s), clock.now
        try:
            while clock.now < start + 20:
                found = beat.look()
                if found is not None:
                    break
                if answers and beat._asked is not None:
                    wait([beat._asked], timeout=60)
                clock.now += 0.1
            return found, clock.now - start
        finally:
            # as a killed server does: the question on its way ends
            closed.set()
            beat.close()


def pong(**changed: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda body: {"text_output": json.dumps(ALIVE | changed)}


def test_an_engine_that_answers_has_no_problem(clock):
    asked = []
    assert problem(clock, lambda body: (asked.append(body), pong()(body))[1])[0] is None
    assert 15 <= len(asked) <= 20
    assert all(json.loads(body["control"]) == {"op": "ping"} for body in asked)


STUCK = "no step has finished for 3 s (setting stuck_after_s)"


def test_one_that_does_not_answer_is_stuck(clock):
    found, after = problem(clock, lambda body: None, answers=False)
    assert found == STUCK
    assert after == pytest.approx(3.0, abs=0.2)
    assert problem(clock, lambda body: None, stuck_after_s=0, answers=False)[0] is None


def test_one_that_answers_with_errors_is_stuck_and_they_are_told(clock):
    found, after = problem(clock, lambda body: {"error": "Stub process 'llm_0_0' is not healthy."})
    assert found == f"{STUCK}; the last answer to a ping was: Stub process 'llm_0_0' is not healthy."
    assert after == pytest.approx(3.0, abs=0.2)


@pytest.mark.parametrize(
    "said",
    [
        b"",
        b"<html>It works!</html>",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        7,
        {},
        {"text_output": None},
        {"text_output": "{"},
        {"text_output": "[]"},
        {"text_output": "{}"},
        {"text_output": json.dumps(ALIVE | {"since_step_s": "soon"})},
        {"text_output": json.dumps(ALIVE | {"since_step_s": float("nan")})},
        {"text_output": json.dumps(ALIVE | {"failed_steps": None})},
        {"error": {"code": 3}},
    ],
)
def test_one_that_answers_something_else_is_stuck_and_it_is_told(clock, said):
    found, after = problem(clock, lambda body: said)
    assert found is not None
    assert found.startswith(f"{STUCK}; the last answer to a ping was: not kvloom's answer: ")
    assert after == pytest.approx(3.0, abs=0.2)


def test_one_that_answers_between_steps_that_never_finish_is_stuck(clock):
    assert problem(clock, pong(since_step_s=2.99))[0] is None
    assert problem(clock, pong(since_step_s=3.01)) == (STUCK, pytest.approx(0.1))


def test_silence_is_counted_anew_after_an_answer(clock):
    numbers = itertools.count()
    assert problem(clock, lambda body: pong()(body) if next(numbers) % 3 == 0 else {"error": "busy"})[0] is None


@pytest.mark.parametrize(
    ("canary", "expected"),
    [
        ({"error": "INTERNAL: the step failed: no device"}, "every step fails: INTERNAL: the step failed: no device"),
        ({"error": "UNAVAILABLE: queue full"}, None),
        ({"text_output": "x"}, None),
    ],
)
def test_where_steps_fail_a_canary_decides(clock, canary, expected):
    def says(body):
        return canary if "input_ids" in body else pong(failed_steps=1)(body)

    assert problem(clock, says)[0] == expected
