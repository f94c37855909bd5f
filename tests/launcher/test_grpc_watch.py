"""A gRPC endpoint that hangs while everything else works is noticed, and the server is started again."""

import math
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from kvloom.launcher import grpc_watch
from kvloom.launcher.grpc_watch import GrpcWatch
from kvloom.launcher.ports import Ports
from kvloom.launcher.repository import ModelRepository
from kvloom.launcher.supervisor import Supervisor
from kvloom_client import Client
from support.server import eventually
from support.tiny_server import CANARY

ROUNDS = 6
"""Twice as many pings as may fail."""


@pytest.fixture
def silent() -> Iterator[str]:
    """A port where connections are taken and nothing is ever said."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture(autouse=True)
def often(monkeypatch) -> None:
    monkeypatch.setattr(grpc_watch, "PERIOD_S", 0.0)


@pytest.fixture
def hasty(monkeypatch) -> None:
    monkeypatch.setattr(grpc_watch, "TIMEOUT_S", 0.3)
    monkeypatch.setattr(grpc_watch, "LATER_S", 0.1)


def works() -> float:
    """An HTTP endpoint that has answered a ping of this moment."""
    return time.monotonic()


def hangs() -> float:
    return -math.inf


def problem(url: str, http: Callable[[], float]) -> str | None:
    """What a watch finds in six pings."""
    watch = GrpcWatch(url)
    try:
        for _ in range(ROUNDS + 1):
            found = watch.look(http())
            if found is not None:
                return found
            assert watch._asked is not None
            watch._asked.result()
        return None
    finally:
        watch.close()


def test_an_endpoint_that_answers_has_no_problem(server):
    assert problem(server.grpc_url, works) is None


def test_one_that_hangs_while_http_works_has(hasty, silent):
    found = problem(silent, works)
    assert found is not None
    assert found.startswith("the gRPC endpoint does not work: 3 pings in a row failed; the last one: ")


def test_one_that_nobody_listens_at_has():
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        found = problem(f"127.0.0.1:{nobody.getsockname()[1]}", hangs)
    assert found is not None and "Connection refused" in found


def test_where_http_hangs_too_it_is_not_known(hasty, silent):
    assert problem(silent, hangs) is None


def test_a_ping_over_http_that_was_sent_before_tells_nothing(hasty, silent):
    """In a step of four seconds both wait, and both are answered after it."""
    assert problem(silent, lambda: time.monotonic() - grpc_watch.TIMEOUT_S) is None


@pytest.mark.slow
def test_a_server_whose_grpc_endpoint_hangs_is_replaced(tiny, silent, capsys):
    settings = {"model": str(tiny.folder), "weights": "fp32", "threads": "1", "kv_blocks": "64"}
    stop = threading.Event()
    with Supervisor(ModelRepository(settings), ports=Ports(), stop=stop, exit_timeout_s=5) as supervised:
        first = supervised._server
        assert first is not None
        supervised._grpc_watch = GrpcWatch(silent)
        watching = threading.Thread(target=supervised.watch)
        watching.start()
        try:
            eventually(lambda: supervised.recoveries == 1, within=120)
            assert supervised.ready
            first.process.wait(10)
            with Client(f"127.0.0.1:{supervised.ports.grpc}") as client:
                assert len(client.generate(**CANARY, timeout=60).token_ids) == CANARY["max_tokens"]
        finally:
            stop.set()
            watching.join()
    said = capsys.readouterr().err
    assert "kvloom: the gRPC endpoint does not work: 3 pings in a row failed; the last one: " in said
    assert "kvloom: serving again " in said
