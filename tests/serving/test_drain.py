"""A server that is to end takes no new requests, and lets the running ones come to their end."""

import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import tritonclient.grpc as triton

from kvloom.admin import admits, digest, digests
from kvloom.engine.thread import EngineThread, Pulse
from kvloom.errors import InvalidArgument, Unavailable
from kvloom.request import FinishReason
from kvloom.serving.control import Control, act
from kvloom_client import Client, HttpClient, RequestFailed
from support.engine_driver import Driver
from support.launched import Launched, launched
from support.server import Footprint
from support.tiny_models import make_tiny
from support.tiny_server import Tiny, stub
from support.waiting import submit

TOKEN = "let me"
PROMPT = (5, 6)


# the engine thread


@pytest.fixture
def engine_thread(tmp_path) -> Iterator[EngineThread]:
    engine = Driver(make_tiny(tmp_path / "model", max_position_embeddings=4096), kv_blocks=1024).engine
    running = EngineThread(lambda: engine)
    yield running
    running.stop()


def drain(engine_thread: EngineThread, timeout_s: float = float("inf")) -> "list[int]":
    """Begin to drain; the list gets how many answers were cut short, in the end."""
    cut_short: list[int] = []
    engine_thread.drain(timeout_s, cut_short.append)
    return cut_short


def pulse(engine_thread: EngineThread) -> Pulse:
    found: list[Pulse] = []
    told = threading.Event()
    engine_thread.ping(lambda pulse: (found.append(pulse), told.set()))
    assert told.wait(10)
    return found[0]


def wait_for(list_: list) -> None:
    deadline = time.monotonic() + 60
    while not list_:
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_running_answers_end_and_new_ones_are_refused(engine_thread):
    running, _ = submit(engine_thread, PROMPT, max_tokens=300)
    wait_for(running)
    first, second = drain(engine_thread), drain(engine_thread)
    late, refused = submit(engine_thread, PROMPT, max_tokens=5)
    assert refused.wait(10)
    assert isinstance(late.error, Unavailable)
    assert str(late.error) == "UNAVAILABLE: the server is shutting down and takes no new requests"
    wait_for(second)
    assert (first, second) == ([0], [0])
    assert running.reason is FinishReason.LENGTH  # when drain says so, it has its end
    assert len(running.ids) == 300
    assert pulse(engine_thread).draining


def test_an_idle_loop_is_drained_at_once(engine_thread):
    cut_short = drain(engine_thread)
    wait_for(cut_short)
    assert cut_short == [0]
    refused = submit(engine_thread, PROMPT, max_tokens=5)[0]
    wait_for(refused)
    assert isinstance(refused.error, Unavailable)


def test_what_takes_too_long_is_cut_short(engine_thread):
    answers = [submit(engine_thread, PROMPT, max_tokens=4000)[0] for _ in range(3)]
    wait_for(answers[0])
    start = time.monotonic()
    cut_short = drain(engine_thread, 0.2)
    wait_for(cut_short)
    assert time.monotonic() - start >= 0.2
    assert cut_short == [3]
    for answer in answers:
        assert str(answer.error) == "UNAVAILABLE: the server is shutting down; the answer was cut short"


def test_a_drain_ends_also_when_the_engine_fails_meanwhile(engine_thread, monkeypatch):
    answer, _ = submit(engine_thread, PROMPT, max_tokens=4000)
    wait_for(answer)
    monkeypatch.setattr(engine_thread._engine._scheduler, "plan", lambda: 1 / 0)
    cut_short = drain(engine_thread)
    wait_for(cut_short)
    assert cut_short == [0]
    assert answer.error is not None


# what a ping says


def test_a_pulse_tells_of_steps_that_finish_fail_or_never_come(engine_thread, monkeypatch):
    assert pulse(engine_thread) == Pulse(0.0, 0, False)
    engine = engine_thread._engine
    answer, done = submit(engine_thread, PROMPT, max_tokens=4000)
    wait_for(answer)
    assert pulse(engine_thread).since_step_s < 1.0
    with monkeypatch.context() as patch:
        patch.setattr(engine, "step", lambda: time.sleep(0.01))  # goes round and gets nowhere
        deadline = time.monotonic() + 60
        while pulse(engine_thread).since_step_s <= 0.4:
            assert time.monotonic() < deadline
    with monkeypatch.context() as patch:
        patch.setattr(engine._runner, "run", lambda slices: 1 / 0)
        assert done.wait(10)
        assert pulse(engine_thread) == Pulse(0.0, 1, False)
        submit(engine_thread, PROMPT, max_tokens=5)[1].wait(10)
        assert pulse(engine_thread).failed_steps == 2
    assert submit(engine_thread, PROMPT, max_tokens=5)[1].wait(10)
    assert pulse(engine_thread) == Pulse(0.0, 0, False)


def test_idle_time_does_not_count_for_what_comes_after_it(engine_thread, monkeypatch):
    time.sleep(0.5)
    monkeypatch.setattr(engine_thread._engine, "step", lambda: time.sleep(0.01))
    submit(engine_thread, PROMPT, max_tokens=5)
    assert pulse(engine_thread).since_step_s < 0.3


# who may


def test_tokens_are_admitted_as_they_are_or_as_digests():
    for setting in ("a", "a,b", digest("a"), digests("b,a"), digests("b", "a"), digests("", "a")):
        assert admits(setting, "a")
        assert not admits(setting, "c")
        assert not admits(setting, "")
        assert not admits(setting, digest("a"))
    assert not admits("", "")
    assert "let" not in digests(TOKEN, TOKEN)


def test_without_a_setting_nobody_may():
    with pytest.raises(InvalidArgument, match="admin_token: drain needs one, and .* kvloom serve --set admin_token"):
        act(Control(op="drain", admin_token=""), 1, None, "fp32", "", lambda delta: None)


def test_drain_over_grpc(tiny):
    with tiny.serve(admin_token=TOKEN) as server, Client(server.grpc_url) as client, ThreadPoolExecutor(1) as pool:
        refusals = [
            ({"op": "drain"}, "admin_token: is not this server's"),
            ({"op": "drain", "admin_token": "other"}, "admin_token: is not this server's"),
            ({"op": "drain", "admin_token": digest(TOKEN)}, "admin_token: is not this server's"),
            ({"op": "drain", "admin_token": TOKEN, "timeout_s": -1}, "timeout_s: Input should be greater than"),
            ({"op": "ping", "admin_token": TOKEN}, "admin_token: is for drain only; ping does not take it"),
            ({"op": "flush", "timeout_s": 1}, "timeout_s: is for drain only; flush does not take it"),
        ]
        for control, message in refusals:
            with pytest.raises(RequestFailed, match=f"INVALID_ARG: {message}"):
                client.control(timeout=10, **control)
        with urllib.request.urlopen(f"{server.http_url}/v2/models/llm/config", timeout=10) as response:
            assert TOKEN not in response.read().decode()
        http = HttpClient(server.http_url)
        running = [
            client.stream(input_ids=[5], max_tokens=600, ignore_eos=True),
            http.stream(input_ids=[5], max_tokens=600, ignore_eos=True),
        ]
        for stream in running:
            next(stream)
        draining = pool.submit(client.control, "drain", admin_token=TOKEN, timeout=60)
        while not client.control("ping", timeout=10)["draining"]:
            time.sleep(0.01)
        with pytest.raises(RequestFailed, match="^UNAVAILABLE: the server is shutting down and takes no new requests$"):
            client.generate(input_ids=[5], max_tokens=5, timeout=10)
        assert [list(stream)[-1].finish_reason for stream in running] == ["length", "length"]
        assert draining.result() == {"op": "drain", "ok": True, "cut_short": 0}


# SIGTERM


def settings_of(tiny: Tiny) -> dict[str, str]:
    return {"model": str(tiny.folder), "weights": "fp32", "threads": "1", "block_size": "16", "kv_blocks": "2048"}


def test_sigterm_lets_answers_end_and_leaves_nothing(tiny):
    """Of 8 streams some end by themselves and the others are ended, each with a final, inside the exit timeout."""
    exit_timeout = 6
    with launched(f"--exit-timeout={exit_timeout}", settings=settings_of(tiny)) as serving:
        begun = threading.Barrier(9)

        def stream(number: int) -> tuple[str, int]:
            door = Client(serving.url) if number % 2 else HttpClient(f"http://127.0.0.1:{serving.http}")
            with door:
                # greedy answers of a tiny model: the long ones would take far longer than there is time
                chunks = door.stream(
                    input_ids=[5 + number], max_tokens=200 if number < 4 else 4000, ignore_eos=True, temperature=0.0
                )
                next(chunks)
                begun.wait(30)
                try:
                    rest = list(chunks)
                except RequestFailed as error:
                    return str(error), 0
                return rest[-1].finish_reason, 1

        with ThreadPoolExecutor(8) as pool:
            running = [pool.submit(stream, number) for number in range(8)]
            begun.wait(30)
            serving.process.send_signal(signal.SIGTERM)
            start = time.monotonic()
            serving.wait_until_health_is(503, 2)
            ends = [one.result()[0] for one in running]
            ended = time.monotonic() - start
        output, errors = serving.process.communicate(timeout=30)
        took = time.monotonic() - start
    print(f"answers ended after {ended:.1f} s, the process after {took:.1f} s: {ends}")
    assert ends[:4] == ["length"] * 4
    assert set(ends[4:]) <= {"length", "UNAVAILABLE: the server is shutting down; the answer was cut short"}
    assert ended < exit_timeout
    assert took < exit_timeout + 10
    assert serving.process.returncode == 0
    assert output == ""
    assert "Traceback" not in errors
    serving.footprint.assert_gone()


EXIT_TIMEOUT_S = 60
"""So long that a stop which uses a third of it has not waited for it to pass."""


@pytest.mark.slow
def test_a_client_of_generate_that_leaves_at_the_stop_holds_nothing_up(tiny):
    with launched(f"--exit-timeout={EXIT_TIMEOUT_S}", settings=settings_of(tiny)) as serving:
        with HttpClient(f"http://127.0.0.1:{serving.http}") as http:
            stream = http.stream(input_ids=[5], max_tokens=4000, ignore_eos=True)
            next(stream)
            serving.process.send_signal(signal.SIGTERM)
            stream.cancel()
        assert_ends_early(serving)


def test_a_request_that_triton_loses_count_of_holds_nothing_up(tiny):
    with launched(f"--exit-timeout={EXIT_TIMEOUT_S}", settings=settings_of(tiny)) as serving:
        with triton.InferenceServerClient(serving.url) as client:
            prompt = triton.InferInput("text_input", [1, 1], "BYTES")
            prompt.set_shared_memory("nobody registered it", 16)
            refused = threading.Event()
            client.start_stream(lambda result, error: refused.set())
            client.async_stream_infer("llm", [prompt], sequence_id=5, sequence_start=True, sequence_end=True)
            assert refused.wait(30)
            client.stop_stream(cancel_requests=True)
        serving.process.send_signal(signal.SIGTERM)
        assert_ends_early(serving)


def assert_ends_early(serving: Launched) -> None:
    """A server that was told to stop does, long before its exit timeout, and leaves nothing."""
    start = time.monotonic()
    assert serving.process.wait(2 * EXIT_TIMEOUT_S) == 0
    took = time.monotonic() - start
    print(f"the process ended after {took:.1f} s")
    assert took < EXIT_TIMEOUT_S / 3
    serving.footprint.assert_gone()


@pytest.mark.full
def test_a_stuck_engine_does_not_hold_up_the_end(tiny):
    with tiny.serve() as server:
        left = Footprint(server.process.pid)
        stub(server).suspend()
        start = time.monotonic()
        server.stop()
        assert time.monotonic() - start < 12  # an exit timeout of 5 s, and the time to unload
        left.assert_gone()
