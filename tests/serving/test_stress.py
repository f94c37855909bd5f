"""Many requests, many of them cancelled: afterwards nothing runs, waits, or holds memory."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client
from support.server import SETTINGS, Footprint, assert_idle, canary


def storm(server: Server, requests: int, concurrency: int) -> tuple[int, int]:
    """Send requests with prompts and lengths at random, cancel a third of them at random moments.

    Returns:
        (finished answers, cancelled ones).
    """
    rng = random.Random(11)
    plans = [
        (rng.randint(1, 80), rng.randint(1, 50), rng.uniform(0, 2) if rng.random() < 1 / 3 else None, rng.random())
        for _ in range(requests)
    ]

    def one(number: int, client: Client) -> bool:
        prompt, length, cancel_after_s, kind = plans[number]
        ids = [random.Random(number).randrange(100, 40_000) for _ in range(prompt)]
        begun = time.monotonic()
        stream = client.stream(
            input_ids=ids, max_tokens=length, ignore_eos=True, temperature=kind, seed=number, timeout=300
        )
        timer = threading.Timer(cancel_after_s, stream.cancel) if cancel_after_s is not None else None
        if timer:
            timer.start()
        tokens = [token for chunk in stream for token in chunk.token_ids]
        if timer:
            timer.cancel()
        if stream.cancelled:
            assert time.monotonic() - begun < 60
            return False
        assert len(tokens) == length
        return True

    with Client(server.grpc_url) as client, ThreadPoolExecutor(concurrency) as pool:
        done = list(pool.map(lambda number: one(number, client), range(requests)))
    return sum(done), len(done) - sum(done)


@pytest.mark.alone
def test_cancel_storm_leaves_nothing_behind():
    with Server.start(ModelRepository(SETTINGS), exit_timeout_s=5) as server:
        footprint = Footprint(server.process.pid)
        assert footprint.processes()
        assert footprint.shared_memory()
        finished, cancelled = storm(server, requests=100, concurrency=16)
        assert finished + cancelled == 100
        assert cancelled >= 10
        assert_idle(server)
        canary(server)
        assert_idle(server)
    footprint.assert_gone()


@pytest.mark.alone
@pytest.mark.full
def test_cancel_storm_leaves_nothing_behind_full(server):
    for _ in range(5):
        finished, cancelled = storm(server, requests=200, concurrency=64)
        assert finished + cancelled == 200
        canary(server)
        assert_idle(server)
