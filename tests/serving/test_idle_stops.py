"""A server that has nothing to do is told to stop, after all kinds of use."""

import signal
import statistics
import threading
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton

from kvloom_client import Client, HttpClient
from support.launched import Launched, launched
from support.server import assert_idle
from support.tiny_server import Tiny

EXIT_TIMEOUT_S = 60
"""So long that a stop which uses a third of it has not waited for it to pass."""

CLIENTS = 8
ANSWER = {"max_tokens": 50, "temperature": 0.0, "ignore_eos": True, "timeout": 60}


def at_once(use: Callable[[int], Any]) -> None:
    """Eight clients, each with its number."""
    with ThreadPoolExecutor(CLIENTS) as pool:
        list(pool.map(use, range(CLIENTS)))


def nothing(serving: Launched) -> None:
    """Only the launcher has asked it anything."""


def whole_answers(serving: Launched) -> None:
    """480 short ones over gRPC."""

    def client(_: int) -> None:
        with Client(serving.url) as client:
            for number in range(60):
                client.generate(text_input="abc" * (1 + number % 8), **ANSWER)

    at_once(client)


def whole_answers_of_generate(serving: Launched) -> None:
    """480 short ones over gRPC, from the model that has no sequences, with Triton's own client."""

    def client(_: int) -> None:
        came: list[Any] = []
        one = threading.Semaphore(0)
        with triton.InferenceServerClient(serving.url) as client:
            client.start_stream(lambda result, error: (came.append(error), one.release()))
            for number in range(60):
                text = triton.InferInput("text_input", [1, 1], "BYTES")
                text.set_data_from_numpy(np.array([["abc" * (1 + number % 8)]], dtype=np.object_))
                most = triton.InferInput("max_tokens", [1, 1], "INT32")
                most.set_data_from_numpy(np.array([[50]], dtype=np.int32))
                client.async_stream_infer("generate", [text, most])
                assert one.acquire(timeout=60)
            client.stop_stream()
        assert came == [None] * 60

    at_once(client)


def streams(serving: Launched) -> None:
    """Over gRPC and over HTTP."""

    def client(number: int) -> None:
        with Client(serving.url) if number % 2 else HttpClient(f"http://127.0.0.1:{serving.http}") as client:
            for length in range(1, 9):
                assert list(client.stream(text_input="abc" * length, **ANSWER))

    at_once(client)


def conversations(serving: Launched) -> None:
    """Some are ended, some are not."""

    def client(number: int) -> None:
        with Client(serving.url) as client:
            for _ in range(4):
                talk = client.conversation()
                for _ in range(3):
                    talk.generate(input_ids=[5, 6, 7], **ANSWER)
                if number % 2:
                    talk.end()

    at_once(client)


def cancels(serving: Launched) -> None:
    """Streams that their clients leave in the middle, over gRPC and over HTTP."""

    def client(number: int) -> None:
        with Client(serving.url) if number % 2 else HttpClient(f"http://127.0.0.1:{serving.http}") as client:
            for _ in range(5):
                stream = client.stream(input_ids=[5, 6, 7], **ANSWER | {"max_tokens": 3000})
                next(stream)
                stream.cancel()

    at_once(client)


def pings_and_metrics(serving: Launched) -> None:
    """What watches a server."""

    def client(_: int) -> None:
        with Client(serving.url) as client:
            for _ in range(20):
                assert client.control("ping", timeout=60)["ok"]
                urllib.request.urlopen(serving.metrics_url, timeout=60).read()

    at_once(client)


@pytest.mark.parametrize(
    "rounds",
    [pytest.param(1, marks=pytest.mark.slow, id="once"), pytest.param(20, marks=pytest.mark.full, id="often")],
)
@pytest.mark.parametrize(
    "use",
    [nothing, whole_answers, whole_answers_of_generate, streams, conversations, cancels, pings_and_metrics],
    ids=lambda use: use.__name__,
)
def test_an_idle_server_stops_soon_and_leaves_nothing(tiny, tmp_path, monkeypatch, use, rounds):
    folder = tmp_path / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    took = [stop_after(use, tiny, tmp_path / f"log{number}", folder) for number in range(rounds)]
    print(f"{use.__name__}: {rounds} stops, median {statistics.median(took):.2f} s, longest {max(took):.2f} s")


def stop_after(use: Callable[[Launched], None], tiny: Tiny, log: Path, folder: Path) -> float:
    """How many seconds it took."""
    settings = {"model": str(tiny.folder), "weights": "fp32", "threads": "1", "block_size": "16", "kv_blocks": "2048"}
    with launched(f"--exit-timeout={EXIT_TIMEOUT_S}", f"--log-file={log}", settings=settings) as serving:
        use(serving)
        assert_idle(serving, conversations=use is conversations)
        start = time.monotonic()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.process.wait(2 * EXIT_TIMEOUT_S) == 0
        took = time.monotonic() - start
        serving.footprint.assert_gone()
    assert list(folder.iterdir()) == []
    assert took < EXIT_TIMEOUT_S / 3
    assert "xit timeout expired" not in log.read_text()
    return took
