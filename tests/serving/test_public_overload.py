"""Faults that users of such servers reported, against real servers: more requests than are taken (H35)."""

import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom.launcher.launch import Server
from kvloom_client import Client, RequestFailed
from support.http_door import post
from support.tiny_server import tokens

DOORS = ["llm over gRPC", "generate over gRPC", "generate over HTTP"]


@pytest.fixture(scope="module")
def narrow(tiny) -> Iterator[Server]:
    """Two requests run, four wait, none for longer than a second."""
    with tiny.serve(max_running=2, max_queue=4, queue_timeout_ms=1000) as server:
        yield server


def burst(server: Server, client: Client, door: str, max_tokens: int, gap_s: float) -> dict[str, list[float]]:
    """Send 30 requests, ``gap_s`` apart; by how they ended: after how many seconds each of them did."""
    seen: dict[str, list[float]] = {"finished": [], "queue full": [], "queue_timeout_ms": []}

    def one(number: int) -> None:
        time.sleep(number * gap_s)
        request = {"input_ids": tokens(3500 + number, 20), "max_tokens": max_tokens, "temperature": 0.0}
        begun = time.monotonic()
        if door.endswith("HTTP"):
            body = {**request, "sampling_parameters": '{"ignore_eos": true}'}
            status, text = post(server, body)
            assert status == 200 or text.startswith('{"error":"UNAVAILABLE: '), text
        else:
            try:
                text = client.generate(**request, ignore_eos=True, model=door.split()[0], timeout=60).text
            except RequestFailed as error:
                text = error.text
                assert text.startswith("UNAVAILABLE: ")
        how = next((how for how in ("queue full", "queue_timeout_ms") if f"UNAVAILABLE: {how}" in text), "finished")
        seen[how].append(time.monotonic() - begun)

    with ThreadPoolExecutor(30) as pool:
        list(pool.map(one, range(30)))
    assert sum(map(len, seen.values())) == 30
    return seen


def refused_in_time(seen: dict[str, list[float]]) -> None:
    """Who finds the queue full is told at once, and who waits in it after ``queue_timeout_ms``."""
    assert all(seconds >= 1 for seconds in seen["queue_timeout_ms"])
    if seen["queue full"]:
        assert statistics.median(seen["queue full"]) < min(seen["queue_timeout_ms"], default=1)


@pytest.mark.slow
@pytest.mark.parametrize("door", DOORS)
def test_h35_a_burst_is_refused_where_it_does_not_fit(tiny, narrow, door):
    with tiny.client(narrow) as client:
        seen = burst(narrow, client, door, max_tokens=4000, gap_s=0)
        assert len(seen["finished"]) + len(seen["queue_timeout_ms"]) <= 6
        assert len(seen["finished"]) >= 2
        refused_in_time(seen)


@pytest.mark.slow
@pytest.mark.parametrize("door", [DOORS[0], *(pytest.param(door, marks=pytest.mark.full) for door in DOORS[1:])])
def test_h35_a_steady_overload_is_refused_in_part(tiny, narrow, door):
    """The load is told by how long an answer takes here: two at a time, and five come meanwhile."""
    with tiny.client(narrow) as client:
        begun = time.monotonic()
        client.generate(input_ids=tokens(3499, 20), max_tokens=1000, temperature=0.0, ignore_eos=True)
        alone_s = time.monotonic() - begun
        seen = burst(narrow, client, door, max_tokens=1000, gap_s=alone_s / 5)
        assert len(seen["finished"]) >= 4
        assert len(seen["finished"]) < 30
        refused_in_time(seen)
