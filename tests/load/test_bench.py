"""The benchmark: that it runs kvloom as it says, and that its figures follow from what was measured."""

import json
import math
import random
import subprocess
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import psutil
import pytest
from rich.console import Console

import benchmark
from bench import drivers, measure, profile_step
from bench.cases import FULL, QUICK, Case, cases, figure, rounds
from bench.compare import DOOR
from bench.drivers import Driver, EngineFailed
from bench.floors import Floors
from bench.measure import Measurement, MemoryShortError
from bench.probe import Probe, unsteady
from bench.profile_step import REPLAYED, STEP
from bench.prompts import BEGINNING, PromptSource
from bench.record import Record
from bench.tables import QUICK as QUICK_SAYS
from bench.variants import ALONE, DOORS, Variant, together, variants
from kvloom.config import Settings
from support.default_model import MACHINE, default_spec
from support.tiny_models import make_tiny

SCRIPT = Path(__file__).parents[2] / "load" / "benchmark.py"


@pytest.mark.alone
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
    assert QUICK_SAYS in page and QUICK_SAYS in done.stdout and "the rounds' own" not in done.stdout
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


def test_floors_are_those_of_the_default_model():
    floors = Floors(MACHINE, default_spec(), "bf16")
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
    faster = Floors(MACHINE, default_spec(), "int8")
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
    said = capsys.readouterr().out
    assert "10.49, faster" in said
    assert "the machine changed while it was measured: memory: " in said
    assert f"results: {tmp_path / 'profile.json'}" in said


def test_a_machine_that_changed_meanwhile_is_told():
    assert unsteady([MACHINE, replace(MACHINE, bytes_per_s=25e9)]) == []
    (busy,) = unsteady([MACHINE, replace(MACHINE, bytes_per_s=12e9)])
    assert busy == "memory: 12.0 to 26.0 (10^9/s)"


@pytest.mark.alone
def test_the_machine_is_measured_as_fast_as_its_memory_is_read():
    with Probe() as process:
        machine = process.measure(3)
    numbers = np.ones(2**26)
    begin = time.perf_counter()
    numbers.sum()
    # all cores at once read no slower than one does
    assert machine.bytes_per_s > 0.7 * numbers.nbytes / (time.perf_counter() - begin)
    assert machine.operations.keys() == {"fp32", "bf16", "int8"}
    # a plain loop would be a hundred times slower than fp32
    assert min(machine.operations.values()) > 0.1 * machine.operations["fp32"]


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


@pytest.mark.slow
def test_a_benchmark_stops_before_memory_runs_out(monkeypatch, tmp_path):
    monkeypatch.setattr(measure, "RESERVE", 2**60)
    alone, grpc = (variant for variant in variants() if variant.name in (ALONE, DOORS[0]))
    model = make_tiny(tmp_path / "model", max_position_embeddings=1024)
    tiny = replace(alone, model=model, options={**alone.options, "kv_memory": "1MiB"})
    prompts = PromptSource(random.Random(0).choices(range(3, 200), k=2000))
    record = Record(tmp_path / "samples", {}, resume=False)
    run = Measurement(QUICK, 1, record, prompts, Console(stderr=True), memory_gib=1.9)
    with pytest.raises(MemoryShortError, match="--resume"):
        run.run([tiny, grpc])
    # what was measured until then is kept, and an engine that can't fit is told
    assert {name for name, samples in record.seconds[ALONE][0].items() if samples} == {"one/1", "all/1"}
    assert record.absent == {grpc.name: "it may need 2.0 GiB of memory, but engines may use 1.9 GiB"}


def test_a_step_is_profiled(monkeypatch, tmp_path):
    monkeypatch.setattr(profile_step, "PROMPT", 16)
    monkeypatch.setattr(profile_step, "NEW", 6)
    # the prompts are of the default model's tokens
    model = make_tiny(tmp_path / "model", head_dim=64, vocab_size=default_spec().vocab_size)
    settings = Settings.parse(
        {"model": str(model), "device": "cpu", "weights": "bf16", "kv_memory": "64MiB", "threads": "1"}
    )
    heard: list[str] = []
    profiles = profile_step.profile(settings, [2], heard.append)
    assert heard == ["steps of 2 streams, op by op", "steps of 2 streams, replayed"]
    # all steps but those of the prompts; one fewer gives both a token if the second prompt came a step later
    [one] = profiles
    assert {one.by_op.steps, one.replayed.steps} <= {4, 5}
    made = {row["op"]: row for row in profile_step.rows(profiles, default_spec(), MACHINE, settings)}
    named = {"qkv", "attention_out", "gate_up", "down", "head", *profile_step.OPS, "sampling", "batch tensors"}
    assert made.keys() == named | {profile_step.MODEL_REST, profile_step.STEP_REST, STEP, REPLAYED}
    assert all(row["ms"] > 0 for row in made.values())
    inside = sum(row["ms"] for op, row in made.items() if op not in (STEP, REPLAYED))
    assert inside == pytest.approx(made[STEP]["ms"], abs=0.02)
    assert made[STEP]["floor_ms"] == made[REPLAYED]["floor_ms"] > made["gate_up"]["floor_ms"] > 0


def test_an_engine_that_can_not_be_loaded_says_why():
    missing = Variant(
        "llama.cpp", "llamacpp", "bf16", Path("none.gguf"), {"binary": "/nowhere", "slots": 1, "slot_tokens": 1}
    )
    with pytest.raises(EngineFailed, match="FileNotFoundError.*/nowhere"):
        Driver(missing)


def test_a_process_that_has_just_ended_has_no_memory():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as running:
        process = psutil.Process(running.pid)
        assert drivers._rss(process) > 0
        running.communicate()
    assert drivers._rss(process) == 0


def test_peers_keep_the_precision_and_the_version_that_are_said():
    by_name = {variant.name: variant.options for variant in variants()}
    assert by_name["OpenVINO GenAI bf16"]["properties"]["KV_CACHE_PRECISION"] == "bf16"
    assert by_name["OpenVINO GenAI int8"]["properties"] == {}
    assert by_name["llama.cpp bf16"]["version"] == "b11434"
