"""Locust's users against servers whose own figures are known (H38, H39 of the faults that users reported)."""

import itertools
import os
import signal
import socket
import statistics
import threading
import time

import pytest

from kvloom.launcher.launch import Server
from kvloom_load.arrivals import Arrivals
from kvloom_load.drive import USERS, LoadPlan, Seen, drive, run_locust
from kvloom_load.figures import Target, row
from support.launched import launched
from support.paced_server import paced
from support.server import assert_idle, canary
from support.sse_server import Exchange, SseServer
from support.tiny_models import make_tiny

FIRST_S, GAP_S, TOKENS = 0.3, 0.05, 20


def means(seen: Seen) -> dict[str, float]:
    """Mean of each of Locust's rows, in milliseconds."""
    return {
        entry["method"]: entry["total_response_time"] / (entry["num_requests"] - entry["num_none_requests"])
        for entry in seen.statistics
        if entry["num_requests"] > entry["num_none_requests"]
    }


def count(seen: Seen, kind: str) -> int:
    return sum(entry["num_requests"] for entry in seen.statistics if entry["method"] == kind)


def outcomes(seen: Seen, outcome: str) -> list[Arrivals]:
    return [answer for answer in seen.answers if answer.outcome == outcome]


def assert_agree(seen: Seen, log: list[dict]) -> None:
    """Locust's figures are those of the users, and the users saw what a mock server's own log says.

    The latter by medians: on a busy machine a single answer may be late by more than 5 %.
    """
    answers = outcomes(seen, "ok")
    measured = {
        "TTFT": [answer.ttft for answer in answers],
        "ITL": [gap for answer in answers for gap in answer.gaps],
        "answer": [answer.seconds for answer in answers],
    }
    for name, values in measured.items():
        assert means(seen)[name] == pytest.approx(statistics.fmean(values) * 1000), name
    logged = {
        "TTFT": [answer["sent"][0] - answer["received"] for answer in log],
        "ITL": [b - a for answer in log for a, b in itertools.pairwise(answer["sent"])],
        "answer": [answer["sent"][-1] - answer["received"] for answer in log],
    }
    found = {name: statistics.median(values) for name, values in measured.items()}
    assert found == pytest.approx({name: statistics.median(values) for name, values in logged.items()}, rel=0.05)
    assert found["TTFT"] == pytest.approx(FIRST_S, abs=0.03)
    assert found == pytest.approx({"TTFT": FIRST_S, "ITL": GAP_S, "answer": FIRST_S + (TOKENS - 1) * GAP_S}, rel=0.1)


@pytest.mark.alone
def test_h38_http_times_are_of_tokens():
    """Headers, comments and events without text come at once; none of them is a token."""
    log = []

    def script(exchange: Exchange) -> None:
        received = time.monotonic()
        exchange.head()
        exchange.send(b": keep-alive\n\n")
        exchange.event(text_output="")
        sent = []
        for token in range(TOKENS):
            time.sleep(max(0.0, received + FIRST_S + token * GAP_S - time.monotonic()))
            exchange.send(b": between tokens\n\n")
            exchange.event(text_output="", finish_reason="")
            sent.append(time.monotonic())
            exchange.event(text_output=" a", finish_reason="length" if token == TOKENS - 1 else "")
        exchange.end()
        log.append({"received": received, "sent": sent})

    with SseServer(*[script] * 100) as server:
        seen = run_locust(server.url, LoadPlan("SseUser", seconds=2), users=4)
    assert len(log) == len(outcomes(seen, "ok")) == len(seen.answers) >= 8
    assert count(seen, "ITL") == len(log) * (TOKENS - 1)
    assert_agree(seen, log)


@pytest.mark.alone
def test_h38_grpc_times_are_of_tokens_and_failed_answers_are_in_no_figure(tmp_path):
    with paced(tmp_path / "log", TOKENS, FIRST_S, GAP_S, fail_every=4) as server:
        seen = run_locust(server.url, LoadPlan(seconds=2), users=6)
        log = server.answers()
    whole = [answer for answer in log if not answer["failed"]]
    assert len(whole) == len(outcomes(seen, "ok")) == count(seen, "TTFT") == count(seen, "tokens/s") >= 5
    assert len(log) - len(whole) == len(outcomes(seen, "failed")) >= 2
    assert count(seen, "answer") == len(log)
    assert count(seen, "ITL") == len(whole) * (TOKENS - 1)
    [failures] = [entry["num_failures"] for entry in seen.statistics if entry["method"] == "answer"]
    assert failures == len(log) - len(whole)
    assert_agree(seen, whole)


@pytest.mark.slow
def test_cancelled_answers_are_no_failures(tmp_path):
    with paced(tmp_path / "log", 64, 0.05, 0.02) as server:
        seen = run_locust(server.url, LoadPlan(scenario="cancel_storm", seconds=2), users=8)
    assert len(outcomes(seen, "cancelled")) == count(seen, "cancelled") >= 3
    assert len(outcomes(seen, "ok")) == count(seen, "answer") >= 3
    assert not outcomes(seen, "failed")
    assert all(answer.tokens < 64 for answer in outcomes(seen, "cancelled"))


def assert_all_failed(seen: Seen) -> None:
    [failures] = [entry["num_failures"] for entry in seen.statistics if entry["method"] == "answer"]
    assert failures == len(outcomes(seen, "failed")) >= 2
    assert not outcomes(seen, "ok")


@pytest.mark.slow
def test_a_server_that_never_answers_makes_answers_fail():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        plan = LoadPlan(seconds=3, answer_timeout=1, stop_timeout=3)
        assert_all_failed(run_locust(f"127.0.0.1:{silent.getsockname()[1]}", plan, users=2))


@pytest.mark.slow
@pytest.mark.full
@pytest.mark.parametrize("user", USERS)
def test_a_host_that_does_not_exist_makes_answers_fail(user):
    assert_all_failed(run_locust("no-such-host.invalid:8000", LoadPlan(user, seconds=2, answer_timeout=1), users=2))


def in_flight(seen: Seen, moment: float) -> int:
    return sum(answer.begin <= moment < answer.end for answer in seen.answers)


def rate(seen: Seen, begin: float, end: float) -> float:
    """Chunks per second."""
    return sum(begin <= moment < end for answer in seen.answers for moment in answer.times) / (end - begin)


def pause(send, after: float, length: float) -> list[float]:
    """Stop and continue a server, in a thread; the list gets the times of both."""
    times: list[float] = []

    def work() -> None:
        time.sleep(after)
        for number in (signal.SIGSTOP, signal.SIGCONT):
            times.append(time.monotonic())
            send(number)
            time.sleep(length)

    threading.Thread(target=work, daemon=True).start()
    return times


def assert_working_again(
    seen: Seen, users: int, paused: list[float], took: float, plan: LoadPlan, *, within: float
) -> list[Arrivals]:
    """So many seconds after the pause nothing fails any more and every user is at work; returns what failed before."""
    stopped, continued = paused
    end = seen.begin + plan.seconds
    assert continued + within < end
    # the last shape tick may be a second late
    assert took < plan.seconds + plan.stop_timeout + 6
    assert not outcomes(seen, "cut")
    failed = outcomes(seen, "failed")
    assert all(stopped < answer.end < continued + within for answer in failed)
    [failures] = [entry["num_failures"] for entry in seen.statistics if entry["method"] == "answer"]
    assert failures == len(failed)
    assert in_flight(seen, end - 0.5) >= users - 2
    before = rate(seen, seen.begin + 1, stopped)
    assert rate(seen, end - 2, end) > 0.8 * before, (before, rate(seen, end - 2, end))
    return failed


@pytest.mark.alone
def test_h39_grpc_users_survive_a_server_that_pauses(tmp_path):
    plan = LoadPlan(seconds=9, answer_timeout=2, stop_timeout=5)
    with paced(tmp_path / "log", 10, 0.1, 0.1) as server:
        begin = time.monotonic()
        paused = pause(server.process.send_signal, after=4, length=2.5)
        seen = run_locust(server.url, plan, users=50)
        took = time.monotonic() - begin
    failed = assert_working_again(seen, 50, paused, took, plan, within=plan.answer_timeout)
    # answers that the pause made too long are failures, and nothing else is
    assert failed
    assert all(answer.begin < paused[1] for answer in failed)
    assert all(answer.seconds == pytest.approx(plan.answer_timeout, abs=1) for answer in failed)


@pytest.mark.alone
@pytest.mark.full
def test_h39_at_full_length(tmp_path):
    """A real server, all of it stopped for five seconds, under answers of 200 tokens.

    Triton takes a stub that was stopped for more than a second for dead, frees what it still reads, and often goes
    down with it: then answers break, and the launcher brings the server back.
    """
    lengths = tmp_path / "lengths.json"
    lengths.write_text(
        '{"chat": {"prompt": {"tokens": [8], "weights": [1]}, "output": {"tokens": [200], "weights": [1]}}}'
    )
    plan = LoadPlan(seconds=60, lengths=lengths, stop_timeout=20)
    model = make_tiny(tmp_path / "model", max_position_embeddings=1024)
    settings = {"model": str(model), "weights": "fp32", "kv_blocks": "2048", "block_size": "16", "threads": "1"}
    with launched(settings=settings) as serving:
        begin = time.monotonic()
        paused = pause(lambda number: os.killpg(serving.footprint.group, number), after=20, length=5)
        seen = run_locust(serving.url, plan, users=50)
        took = time.monotonic() - begin
        assert_idle(serving)
    assert_working_again(seen, 50, paused, took, plan, within=15)


@pytest.mark.alone
def test_means_are_the_engines(server: Server, tmp_path):
    """On the real server, with answers that take their time."""
    lengths = tmp_path / "lengths.json"
    lengths.write_text(
        '{"chat": {"prompt": {"tokens": [96], "weights": [1]}, "output": {"tokens": [8, 16], "weights": [1, 1]}}}'
    )
    # the first text of all is slow to become tokens, before the engine knows of it
    canary(server)
    run = drive(server, LoadPlan(seconds=3, lengths=lengths), users=2)
    figures = row(run, "default", Target())
    assert figures["ok"] >= 2
    assert figures["failed"] == figures["cut"] == 0
    for name in ("ttft_ms", "itl_ms", "e2e_ms"):
        engine = figures["engine"][name]
        assert figures[name]["mean"] == pytest.approx(engine, rel=0.05, abs=5), (name, figures)
    rows = {entry["type"]: entry["mean"] for entry in figures["locust"]}
    # Locust's rows and the report's figures are of the same answers
    assert rows["TTFT"] == pytest.approx(figures["ttft_ms"]["mean"], rel=0.01)
    assert rows["ITL"] == pytest.approx(figures["itl_ms"]["mean"], rel=0.01)
    assert rows["answer"] == pytest.approx(figures["e2e_ms"]["mean"], rel=0.01)
    assert 1 < figures["engine"]["sequences_per_step"] <= 2
    # one more is the ping with which the users connect
    assert sum(size * count for size, count in figures["triton"]["llm"]["batches"]) == figures["ok"] + 1
    canary(server)
    assert_idle(server)
