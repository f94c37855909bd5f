"""Runs Locust against a server and records the server's metrics at the same time."""

import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from kvloom.launcher.launch import Server
from kvloom_client import Client
from kvloom_load.arrivals import Arrivals
from kvloom_load.lengths import DEFAULT_FILE
from kvloom_load.scenarios import ScenarioName
from kvloom_load.scrape import Metrics, TritonStats, Watch

LOCUSTFILE = Path(__file__).parents[1] / "locustfile.py"
MODELS = ("llm", "generate")
UserName = Literal["GrpcUser", "SseUser", "ChatUser", "ConversationUser"]
USERS: tuple[UserName, ...] = get_args(UserName)
TALK: tuple[UserName, ...] = ("ChatUser", "ConversationUser")
"""The users whose requests are turns of conversations. Their kind of lengths is ``turn``."""


@dataclass(frozen=True)
class LoadPlan:
    """The parameters of a load test.

    Attributes:
        user: the class of the users, one of USERS.
        scenario: a name in scenarios.SCENARIOS.
        seconds: how long users start new requests.
        lengths: the file of prompt and answer lengths.
        answer_timeout: maximum seconds that an answer may take.
        stop_timeout: seconds that running answers get at the end. Longer ones are cut.
        seed: the same seed gives the same requests.
        turns: number of turns of a conversation.
        thinking_s: mean seconds that a user in a conversation waits before the next turn.
    """

    user: UserName = "GrpcUser"
    scenario: ScenarioName = "steady"
    seconds: int = 20
    lengths: Path = DEFAULT_FILE
    answer_timeout: int = 60
    stop_timeout: int = 60
    seed: int = 0
    turns: int = 4
    thinking_s: float = 0.0


@dataclass(frozen=True)
class Seen:
    """The results that the users of one test measured.

    Attributes:
        begin: when the test began (``time.monotonic()``).
        answers: the arrival times of every answer.
        statistics: Locust's own statistics, one entry per row, from its ``--json-file``.
    """

    begin: float
    answers: list[Arrivals]
    statistics: list[dict[str, Any]]


@dataclass(frozen=True)
class Run:
    """The results of one test, measured by users and by the server.

    Attributes:
        users: number of users.
        seconds: how long they started new requests.
        seen: the users' results.
        watch: the server's metrics during the test.
        triton: Triton's statistics of each model, over the test.
    """

    users: int
    seconds: int
    seen: Seen
    watch: Watch
    triton: dict[str, TritonStats]

    @property
    def whole(self) -> Metrics:
        """The engine's metrics over the whole test, including its last answers."""
        return self.watch.seen[-1][1].since(self.watch.seen[0][1])

    @property
    def full(self) -> Metrics:
        """The engine's metrics over the time in which users started new requests."""
        return self.watch.between(self.seen.begin, self.seen.begin + self.seconds)


def run_locust(address: str, plan: LoadPlan, users: int, html: Path | None = None) -> Seen:
    """Run a test with ``users`` users against the server at ``address``. ``html`` is the file for Locust's own report.

    Raises:
        subprocess.CalledProcessError: Locust itself failed. Failed answers are part of the result instead.
    """
    with tempfile.TemporaryDirectory(prefix="kvloom-load-") as folder:
        answers, statistics = Path(folder, "answers.json"), Path(folder, "statistics.json")
        subprocess.run(
            [
                *(sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), plan.user, "--headless"),
                *("--host", address, "--users", str(users), "--spawn-rate", str(users)),
                *("--run-time", f"{plan.seconds}s", "--stop-timeout", str(plan.stop_timeout)),
                *("--scenario", plan.scenario, "--lengths", str(plan.lengths), "--seed", str(plan.seed)),
                *("--answer-timeout", str(plan.answer_timeout), "--answers-file", str(answers)),
                *("--turns", str(plan.turns), "--thinking", str(plan.thinking_s)),
                *("--json-file", str(statistics.with_suffix("")), "--only-summary", "--loglevel", "WARNING"),
                *("--exit-code-on-error", "0"),
                *(("--html", str(html)) if html else ()),
            ],
            check=True,
        )
        record = json.loads(answers.read_text())
        return Seen(
            begin=record["begin"],
            answers=[Arrivals(**answer) for answer in record["answers"]],
            statistics=json.loads(statistics.read_text()),
        )


def drive(server: Server, plan: LoadPlan, users: int, html: Path | None = None) -> Run:
    """Flush the prefix cache, then run a test with ``users`` users and record the server's metrics.

    Raises:
        subprocess.CalledProcessError: see ``run_locust``.
    """
    with Client(server.grpc_url) as client:
        client.control("flush", timeout=plan.answer_timeout)
    address = server.http_url if plan.user == "SseUser" else server.grpc_url
    before = {model: TritonStats.read(server.http_url, model) for model in MODELS}
    with Watch(server.metrics_url) as watch:
        seen = run_locust(address, plan, users, html)
    after = {model: TritonStats.read(server.http_url, model) for model in MODELS}
    return Run(users, plan.seconds, seen, watch, {model: after[model].since(before[model]) for model in MODELS})
