"""What a start says it is doing, from fetching to the first answer."""

import logging
import os
import pty
import re
import subprocess
import sys

import pytest

from kvloom import progress
from kvloom.launcher.serverlog import ServerLog, to_log
from kvloom.launcher.starting import shown
from kvloom.progress import Progress, phase
from support.launched import KVLOOM, launched
from support.server import SETTINGS, eventually

PHASES = [
    "starting tritonserver",
    "CPU threads of a step: 1 (setting threads=1)",
    "loading the model ",
    "warming up: ",
    "waiting for the first answer",
]


def test_of_a_servers_log_only_phases_and_warnings_of_ours_are_told(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvloom")
    log = ServerLog(tmp_path / "log")
    with log.file as file:
        end = log.follow(to_log)
        file.write(
            b"kvloom: INFO kvloom.progress: loading the model\nI1130 Triton's own\nkvloom: WARNING kvloom.ops.na"
        )
        file.flush()
        eventually(lambda: caplog.messages == ["loading the model"])
        file.write(
            b"tive: slow\nkvloom: INFO kvloom.kv.pages: no\nkvloom: WARNING other: no\nkvloom: INFO kvloom.progress: x"
        )
        file.flush()
        end()
        end()
    assert caplog.record_tuples == [
        ("kvloom.progress", logging.INFO, "loading the model"),
        ("kvloom.launcher.serverlog", logging.WARNING, "slow"),
        ("kvloom.progress", logging.INFO, "x"),
    ]


def test_no_more_than_a_line_for_each_tenth_nor_one_a_second(caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kvloom.progress")
    quick = Progress("packing", 1_000_000_000, "MB")
    for done in range(0, 1_000_000_001, 10_000_000):
        quick.at(done)
    assert len(caplog.messages) <= 1
    caplog.clear()
    monkeypatch.setattr(progress, "LEAST_S", 0.0)
    slow = Progress("packing", 1_000_000_000, "MB")
    for done in range(0, 1_000_000_001, 10_000_000):
        slow.at(done)
    assert caplog.messages == [f"packing: {done} of 1000 MB" for done in range(100, 1001, 100)]


def test_where_there_is_no_terminal_each_phase_and_warning_is_a_line(capsys):
    with shown():
        phase("loading [the] model")
        logging.getLogger("kvloom.some.where").warning("no compiler")
    phase("after the start")
    assert capsys.readouterr() == ("", "kvloom: loading [the] model\nkvloom: warning: no compiler\n")


def test_nothing_to_tell_leaves_nothing(capsys):
    with shown():
        pass
    assert capsys.readouterr() == ("", "")


def on_terminal(command: list[str]) -> tuple[str, str]:
    """Run a command with its stderr on a terminal; returns stdout and what the terminal got."""
    master, slave = pty.openpty()
    environment = os.environ | {"TERM": "xterm", "COLUMNS": "200"}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=slave, env=environment, text=True) as running:
        os.close(slave)
        seen = b""
        while True:
            try:
                seen += os.read(master, 4096)
            except OSError:  # the other end is closed
                break
        os.close(master)
        output, _ = running.communicate()
    assert running.returncode == 0, seen
    return output, seen.decode()


def test_on_a_terminal_the_phase_is_one_line_that_goes_at_the_end():
    code = """
import logging, time
from kvloom.launcher.starting import shown
from kvloom.progress import phase
with shown():
    phase("loading [the] model")
    logging.getLogger("kvloom.some.where").warning("no compiler")
    time.sleep(0.3)
    phase("warming up")
    time.sleep(0.3)
"""
    output, seen = on_terminal([sys.executable, "-c", code])
    assert output == ""
    assert "loading [the] model" in seen
    assert "warming up" in seen
    assert seen.count("no compiler") == 1
    # the last thing is that the line is cleared, and the cursor shown
    assert re.search(r"\r(\x1b\[1A)?\x1b\[2K(\x1b\[\?25h)?$", seen), repr(seen[-60:])


# real servers


def in_order(text: str, parts: list[str]) -> bool:
    """Whether all parts are lines' beginnings there, one after the other."""
    return (
        re.search(".*".join(rf"^kvloom: {re.escape(part)}" for part in parts), text, re.MULTILINE | re.DOTALL)
        is not None
    )


@pytest.mark.full  # builds the ops
def test_serve_tells_its_phases_on_stderr_and_builds_in_sight(tiny, tmp_path, monkeypatch):
    # an empty cache: the ops are built at this start
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with launched(f"--model={tiny.folder}") as serving:
        process = serving.process
        process.terminate()
        output, errors = process.communicate(timeout=60)
    assert output == ""
    building = ["building the CPU ops with ", "building the CPU ops: 1 of "]
    assert in_order(errors, [PHASES[0], PHASES[1], *building, *PHASES[2:]]), errors
    assert "INFO" not in errors


@pytest.mark.parametrize("verbose", [False, True])
def test_generate_tells_its_phases_too_and_verbose_shows_all_of_the_log(tiny, verbose):
    arguments = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    arguments += ["--verbose"] if verbose else []
    command = [KVLOOM, "generate", "--serve", f"--model={tiny.folder}", "--max-tokens=3", "--raw", "a b", *arguments]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert "kvloom: starting tritonserver\n" in run.stderr
    assert ("Started GRPCInferenceService" in run.stderr) == verbose
    assert ("kvloom: INFO kvloom.progress: loading the model" in run.stderr) == verbose
    assert in_order(run.stderr, PHASES) != verbose
