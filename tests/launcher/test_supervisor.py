"""`kvloom serve` says truly whether it works, and brings back what has died or hangs."""

import os
import re
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvloom.errors import LaunchError
from kvloom.launcher import heartbeat, supervisor
from kvloom.launcher.heartbeat import Heartbeat
from kvloom.launcher.launch import Server
from kvloom.launcher.ports import Ports
from kvloom.launcher.processes import stubs_of
from kvloom.launcher.repository import ModelRepository
from kvloom.launcher.supervisor import Supervisor
from kvloom_client import (
    AnswerTimeout,
    Client,
    ConnectionFailed,
    Conversation,
    KvloomClientError,
    NotFound,
    Unavailable,
)
from support.launched import Launched, child, health, launched
from support.server import Footprint
from support.tiny_models import make_tiny

STUCK_S = 3
TAKEN_ALONG = r"tritonserver has ended \(signal SIGABRT\)"
"""A stub that dies while it holds a lock of Triton's shared memory may take tritonserver along before anyone looks."""

TOKEN = "let me"
CANARY = {"input_ids": [5, 6, 7], "max_tokens": 8, "temperature": 0.0, "ignore_eos": True}
SHORT: dict[str, Any] = {"max_tokens": 8, "temperature": 0.0, "ignore_eos": True, "timeout": 30}


# starts that fail


@pytest.fixture
def repository(tmp_path) -> ModelRepository:
    (tmp_path / "model.gguf").touch()
    return ModelRepository({"model": str(tmp_path / "model.gguf")})


class FakeServer:
    """Dies as soon as it is told to."""

    def __init__(self) -> None:
        self.ready = True
        self.killed = self.stopped = False

    def check(self) -> None:
        if not self.ready:
            raise LaunchError("it died")

    def kill(self) -> None:
        self.ready, self.killed = False, True

    def stop(self) -> None:
        self.stopped = True


@pytest.fixture
def starts(monkeypatch) -> list[Any]:
    """What the starts to come give: a server or an error."""
    coming: list[Any] = []

    def start(*_: object, **__: object) -> Any:
        one = coming.pop(0)
        if isinstance(one, BaseException):
            raise one
        return one() if callable(one) else one

    monkeypatch.setattr(Server, "start", start)
    monkeypatch.setattr(supervisor, "LOOK_S", 0.01)
    monkeypatch.setattr(heartbeat, "PERIOD_S", 1000.0)
    monkeypatch.setattr(Heartbeat, "_ask_for_beat", lambda self: heartbeat.Beat(0.0, False, None))
    return coming


def test_after_five_failed_starts_it_gives_up(repository, starts, monkeypatch, capsys):
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 0.05))
    first, stop = FakeServer(), threading.Event()
    starts += [first, *[LaunchError(f"start {number} failed") for number in range(5)]]
    with Supervisor(repository, ports=Ports(), stop=stop) as supervised:
        assert supervised.ready
        assert health(supervised.ports.health) == 200
        assert health(supervised.ports.health, "/other") == 404
        first.ready = False
        assert health(supervised.ports.health) == 503
        with pytest.raises(LaunchError, match="^gave up after 5 failed starts; the last error: start 4 failed$"):
            supervised.watch()
        assert health(supervised.ports.health) == 503
    assert first.killed
    errors = capsys.readouterr().err
    assert errors.startswith("kvloom: it died\nkvloom: restarting tritonserver\nkvloom: start 0 failed\n")
    assert errors.count("restarting tritonserver") == 5


def test_servers_that_die_soon_are_started_after_growing_pauses_but_always(repository, starts):
    waited: list[float] = []

    class Stop(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            if timeout != supervisor.LOOK_S:
                waited.append(timeout)
            return super().wait(0.001)

    stop = Stop()
    servers = [FakeServer() for _ in range(9)]
    starts += servers
    for server in servers[:8]:
        server.ready = False
    with Supervisor(repository, ports=Ports(), stop=stop) as supervised:
        thread = threading.Thread(target=supervised.watch)
        thread.start()
        deadline = time.monotonic() + 10
        while supervised.recoveries < 8 and time.monotonic() < deadline:
            time.sleep(0.01)
        stop.set()
        thread.join()
    assert supervised.recoveries == 8
    assert waited == [0.0, 1.0, 2.0, 5.0, 10.0, 10.0, 10.0, 10.0]
    assert all(server.killed for server in servers[:8])
    assert servers[8].stopped and not servers[8].killed


def test_a_stop_ends_a_pause_and_a_start(repository, starts, monkeypatch):
    monkeypatch.setattr(supervisor, "PAUSES_S", (0.0, 60.0))
    for failing in (LaunchError("no"), KeyboardInterrupt()):
        first, stop = FakeServer(), threading.Event()

        def start(first=first, stop=stop, failing=failing):
            threading.Timer(0.2 if isinstance(failing, LaunchError) else 0.0, stop.set).start()
            time.sleep(0.1)
            raise failing

        starts[:] = [first, start]
        with Supervisor(repository, ports=Ports(), stop=stop) as supervised:
            first.ready = False
            began = time.monotonic()
            supervised.watch()
            assert time.monotonic() - began < supervisor.PAUSES_S[1]
            assert not starts
        assert not supervised.ready


# real servers


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def serving(tiny) -> Iterator[Launched]:
    settings = {"model": str(tiny), "weights": "fp32", "threads": "1", "block_size": "16", "kv_blocks": "2048"}
    settings |= {"max_running": "10", "max_queue": "8", "stuck_after_s": str(STUCK_S), "admin_token": TOKEN}
    with launched("--exit-timeout=10", settings=settings) as running:
        yield running


def ask(url: str) -> tuple[int, ...]:
    with Client(url) as client:
        return client.generate(**CANARY, timeout=30).token_ids


def in_streams(url: str, disturb: Callable[[], float], within: float) -> list[str]:
    """Disturb the server while 8 streams run that would run for long.

    Args:
        url: the gRPC endpoint.
        disturb: does it, and returns when it did.
        within: how many seconds later every stream has ended.

    Returns:
        How each ended.
    """
    began = threading.Barrier(9)

    def stream(number: int) -> tuple[str, float]:
        with Client(url) as client:
            chunks = client.stream(input_ids=[5 + number], max_tokens=4000, ignore_eos=True)
            next(chunks)
            began.wait(30)
            try:
                return [chunk.finish_reason for chunk in chunks][-1], time.monotonic()
            except KvloomClientError as error:
                return type(error).__name__, time.monotonic()

    with ThreadPoolExecutor(8) as pool:
        running = [pool.submit(stream, number) for number in range(8)]
        began.wait(30)
        disturbed = disturb()
        ends = [one.result(60) for one in running]
    assert max(at for _, at in ends) - disturbed < within
    return [how for how, _ in ends]


class Talks:
    """Conversations before and after a restart: 20 that rest, one whose second and one whose first turn is running."""

    def __init__(self, client: Client):
        self._client = client
        self._histories: dict[Conversation, list[int]] = {}
        for number in range(21):
            talk, asked = client.conversation(), [7 + number, 8, 9]
            self._histories[talk] = [*asked, *talk.generate(input_ids=asked, **SHORT).token_ids]
        self._lost = client.conversation("lost")
        # held, because a stream that nobody has any more is cancelled, which is an end like others
        self._running = [
            running.stream(input_ids=[5, 6], max_tokens=4000, ignore_eos=True) for running in (talk, self._lost)
        ]
        for stream in self._running:
            next(stream)

    def go_on(self) -> None:
        """Each is as its last finished turn left it; what never had one is lost, and that is said."""
        for stream in self._running:
            with pytest.raises(ConnectionFailed):
                list(stream)
        for talk, history in self._histories.items():
            answer = talk.generate(input_ids=[11, 12], last=True, **SHORT)
            assert answer.token_ids == self._client.generate(input_ids=[*history, 11, 12], **SHORT).token_ids
            assert answer.num_input_tokens == len(history) + 2
        with pytest.raises(NotFound, match="^NOT_FOUND: conversation lost: lost"):
            self._lost.generate(input_ids=[5], **SHORT)


def strike(
    serving: Launched, victim: Callable[[Footprint], int], signum: int, noticed_s: float, said: str
) -> list[str]:
    """Send a signal to a process while 8 streams run; health says no in time, and yes again; returns their ends."""
    serving.struck.append(said)
    before = child(serving.process)

    def disturb() -> float:
        os.kill(victim(before), signum)
        at = time.monotonic()
        serving.wait_until_health_is(503, noticed_s)
        return at

    expected = ask(serving.url)
    with Client(serving.url) as client:
        talks = Talks(client)
        ends = in_streams(serving.url, disturb, noticed_s + 5)
        serving.wait_until_health_is(200, 30)
        before.assert_gone()
        assert ask(serving.url) == expected
        talks.go_on()
    assert child(serving.process).group != before.group
    return ends


@pytest.mark.parametrize("model", ["llm", pytest.param("generate", marks=pytest.mark.full)])
def test_a_killed_stub_is_noticed_and_all_come_back(serving, model):
    said = f"the process of the model {model} has ended"
    ends = strike(serving, lambda footprint: stubs_of(footprint.group)[model].pid, signal.SIGKILL, 5, said)
    assert set(ends) <= {"ConnectionFailed", "ServerError", "length"}
    assert "ConnectionFailed" in ends


@pytest.mark.full
def test_a_killed_tritonserver_comes_back(serving):
    said = "tritonserver has ended (signal SIGKILL)"
    ends = strike(serving, lambda footprint: footprint.group, signal.SIGKILL, 5, said)
    assert set(ends) == {"ConnectionFailed"}


@pytest.mark.slow
def test_a_stuck_engine_is_noticed_and_replaced(serving):
    said = f"no step has finished for {STUCK_S} s (setting stuck_after_s)"
    ends = strike(serving, lambda footprint: stubs_of(footprint.group)["llm"].pid, signal.SIGSTOP, STUCK_S + 3, said)
    assert set(ends) <= {"ConnectionFailed", "ServerError"}
    assert "ConnectionFailed" in ends


def test_a_full_queue_is_no_dead_server(serving):
    group = child(serving.process).group
    refused = 0
    with Client(serving.url) as client:
        # long answers in few messages: the queue stays full, and the server has time to refuse
        long = {"input_ids": [5], "max_tokens": 4000, "ignore_eos": True, "logprobs": 20, "stream_interval_ms": 500}
        streams = [client.stream(**long) for _ in range(24)]
        end = time.monotonic() + STUCK_S + 2
        while time.monotonic() < end:
            assert health(serving.health) == 200
            with pytest.raises((Unavailable, AnswerTimeout)) as error:
                client.generate(input_ids=[5], max_tokens=4000, ignore_eos=True, timeout=0.5)
            refused += error.type is Unavailable
            time.sleep(0.2)
        for stream in streams:
            stream.cancel()
    assert refused > 5
    assert child(serving.process).group == group


def test_a_drained_server_is_not_ready_but_not_dead(serving):
    group = child(serving.process).group
    with Client(serving.url) as client:
        assert client.control("drain", admin_token=TOKEN, timeout=10)["ok"]
        serving.wait_until_health_is(503, 5)
        time.sleep(3 * supervisor.LOOK_S)
        assert health(serving.health) == 503
        assert client.control("ping", timeout=10)["draining"]
    assert child(serving.process).group == group


def test_a_stop_during_a_recovery_leaves_nothing(serving):
    before = child(serving.process)
    os.kill(before.group, signal.SIGKILL)
    after = child(serving.process, but=before.group)
    serving.process.send_signal(signal.SIGTERM)
    output, errors = serving.process.communicate(timeout=20)
    assert serving.process.returncode == 0, errors
    assert output == ""  # the one line was all
    before.assert_gone()
    after.assert_gone()
    assert errors.count("kvloom: serving again ") == len(serving.struck)
    assert errors.count("kvloom: restarting tritonserver") == len(serving.struck) + 1
    for said in [*serving.struck, "tritonserver has ended (signal SIGKILL)"]:
        assert re.search(rf"^kvloom: ({re.escape(said)}|{TAKEN_ALONG}); the ", errors, re.MULTILINE), said
    assert "Traceback" not in errors.replace("  | Traceback", "")


def test_nothing_is_left_of_a_launcher_that_is_killed(tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    settings = {"model": str(tiny), "weights": "fp32", "threads": "1", "kv_blocks": "64"}
    with launched(settings=settings) as serving:
        assert len(serving.footprint.processes()) >= 3
        assert serving.footprint.shared_memory()
        assert list(tmp_path.iterdir())
        started = psutil.Process(serving.process.pid).children(recursive=True)
        serving.process.kill()
        _, left = psutil.wait_procs(started, timeout=10)
        assert left == []
    serving.footprint.assert_gone()
    assert list(tmp_path.iterdir()) == []
