"""What load/run.py refuses before it starts a server, and what it says while it runs."""

import json
import re
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest

import run as command
from kvloom.errors import LaunchError
from kvloom_load.drive import USERS, LoadPlan
from kvloom_load.progress import Progress
from kvloom_load.scenarios import SCENARIOS
from support.tiny_models import make_tiny


def call(monkeypatch, *arguments: str) -> int:
    """Run the command in this process; its exit code, 1 for a message."""
    monkeypatch.setattr(sys, "argv", ["run.py", *arguments])
    with pytest.raises(SystemExit) as ended:
        command.main()
    if isinstance(ended.value.code, str):
        print(ended.value.code, file=sys.stderr)
        return 1
    return ended.value.code or 0


@pytest.fixture
def model(tmp_path, monkeypatch) -> str:
    """A model; what is started on it is an error."""

    def start(*_: object) -> None:
        raise AssertionError("a server was started")

    monkeypatch.setattr(command, "serve", start)
    monkeypatch.chdir(tmp_path)
    return f"model={make_tiny(tmp_path / 'model')}"


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["run", "--user", "Bogus"], 2, "'Bogus' is not one of 'GrpcUser', 'SseUser', 'ChatUser', 'ConversationUser'"),
        (["run", "--scenario", "bogus"], 2, "'bogus' is not one of 'steady', 'ramp', .*'cancel_storm'"),
        (["run", "--users", "0"], 2, "'--users': '0': expected numbers of at least 1"),
        (["run", "--users", "a,b"], 2, "'--users': 'a,b': expected numbers of at least 1"),
        (["run", "--users", "1,,4"], 2, "'--users': '1,,4': expected numbers of at least 1"),
        (["run", "--answer-timeout", "0"], 2, "'--answer-timeout'"),
        (["run", "--lengths", "missing.json"], 2, "'--lengths': .*missing.json' does not exist"),
        (["run", "--lengths", "chats.json", "--scenario", "long_short"], 2, "chats.json: the kind 'long' is missing"),
        (["run", "--lengths", "chats.json", "--user", "ChatUser"], 2, "chats.json: the kind 'turn' is missing"),
        (["compare", "bogus"], 2, "'bogus' is not one of 'max_running', .*'batcher_delay', 'conversations'"),
        (["compare", "max_running", "--set", "max_running=4"], 2, "'--set': max_running is set by the comparison"),
        (["run", "--set", "foo=1"], 1, "^load: unknown setting 'foo'; known: .*$"),
        (["run", "--set", "foo"], 1, "^load: .*expected KEY=VALUE"),
        (["run", "--set", "block_size=17"], 1, "^load: setting block_size='17': must be a power of two$"),
        (["compare", "prefix_cache", "--set", "retain_memory=1MiB"], 1, "^load: .*retaining needs prefix_cache"),
    ],
)
def test_wrong_arguments_are_told_before_a_server_is_started(arguments, code, message, model, monkeypatch, capsys):
    lengths = {"tokens": [1], "weights": [1]}
    with open("chats.json", "w") as file:
        json.dump({"chat": {"prompt": lengths, "output": lengths}}, file)
    assert call(monkeypatch, *arguments, "--set", model) == code
    said = capsys.readouterr().err
    assert re.search(message, " ".join(said.split()))
    assert "Traceback" not in said


def test_what_can_be_chosen_is_what_there_is():
    assert set(command.ScenarioName.__args__) == set(SCENARIOS)
    assert set(command.ComparisonName.__args__) == set(command.COMPARISONS)


def test_a_server_that_does_not_start_is_one_line(model, monkeypatch, capsys):
    def start(*_: object) -> None:
        raise LaunchError("it does not start")

    monkeypatch.setattr(command, "serve", start)
    assert call(monkeypatch, "run", "--set", model) == 1
    assert capsys.readouterr().err.splitlines()[-1] == "load: it does not start"


def row(users: int, speed: float, failed: int = 0) -> dict:
    ttft = {"p50": 81.6}
    return {"configuration": "a", "users": users, "tokens_per_s": speed, "failed": failed, "ttft_ms": ttft}


def test_reports_of_different_loads_do_not_overwrite_each_other(model, monkeypatch):
    names = []

    @contextmanager
    def serve(*_: object):
        yield SimpleNamespace()

    monkeypatch.setattr(command, "serve", serve)
    monkeypatch.setattr(command, "drive", lambda *_: None)
    monkeypatch.setattr(command, "row", lambda *_: row(1, 10.0))
    monkeypatch.setattr(command.report, "show", lambda _: None)
    monkeypatch.setattr(command.report, "write", lambda folder, name, meta, rows: names.append(name))
    for scenario in SCENARIOS:
        for user in USERS:
            call(monkeypatch, "run", "--users", "1", "--scenario", scenario, "--user", user, "--set", model)
    assert len(set(names)) == len(SCENARIOS) * len(USERS)
    call(monkeypatch, "run", "--users", "1", "--name", "mine", "--set", model)
    assert names[-1] == "mine"


def test_progress_says_what_comes_and_what_has_come(capsys):
    progress = Progress(LoadPlan(scenario="burst", seconds=20), [1, 8], 2)
    progress.finished(row(1, 84.04))
    progress.finished(row(8, 200.0, failed=3) | {"ttft_ms": None})
    first, second, third = capsys.readouterr().err.splitlines()
    assert first.startswith("burst, GrpcUser: 2 servers, 1 user, 8 users, 20 s each: about 2 min 20 s; ")
    assert re.fullmatch(r"1 of 4 after 0 s: a, 1 user: 84\.0 tokens/s, TTFT 82 ms", second)
    assert re.fullmatch(r"2 of 4 after 0 s: a, 8 users: 200\.0 tokens/s, no answer, 3 failed", third)
