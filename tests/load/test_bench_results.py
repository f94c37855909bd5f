"""What a benchmark shows: rows, comparisons, the main figures."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import probe, tables
from bench.cases import FULL, Case
from bench.compare import BEST, DEFAULT_FILE, DOOR, MORE, PEERS, SERVED, comparisons
from bench.figures import ResultsError, figures
from bench.floors import Floors
from bench.profile_step import REPLAYED, STEP
from bench.record import Record
from bench.results import machines, rows
from bench.variants import ALONE, about, variants
from support.default_model import MACHINE, default_spec


def test_rows_are_medians_and_say_what_is_left_out(tmp_path):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    whole, cut = variants()[0], next(variant for variant in variants() if variant.skips and variant.max_streams < 64)
    rates = [MACHINE, replace(MACHINE, operations={**MACHINE.operations, "bf16": 230e9}), MACHINE]
    for number, seconds in enumerate((3.0, 1.0, 2.0)):
        record.machine([whole.name], number, "batch/32", [rates[number]])
        record.run(whole.name, number, "all/32", seconds, [5] * 32)
        record.run(cut.name, number, "all/8", 2 * seconds, [5] * 4 + [6] * 4)
        record.run(whole.name, number, "all/8", seconds, [5] * 8)
    made = rows([whole, cut], record, FULL, 3, default_spec())
    by = {(row["engine"], row["case"], row["size"]): row for row in made}
    row = by[whole.name, "total", 32]
    assert row["value"] == 32 * 64 / 2.0 and row["rounds"] == [pytest.approx(2048 / s, abs=0.05) for s in (3, 1, 2)]
    # shares are of the floors of their rounds: the second was on half a machine, and is the best by far
    floors = [Floors(machine, default_spec(), "bf16").of(Case("total", 32), FULL) for machine in rates]
    shares = [2048 / s / floor for s, floor in zip((3, 1, 2), floors, strict=True)]
    assert row["of_floor"] == pytest.approx(sorted(shares)[1], abs=1e-3)
    assert by[cut.name, "same_first_token", None]["value"] == 0.5
    assert "skipped" in by[cut.name, "total", 64] and "skipped" in by[cut.name, "shared", 32]
    assert tables.cells(made)[cut.name]["total", 64] == "-"


def test_a_median_of_fewer_rounds_says_so(tmp_path):
    record = Record(tmp_path / "samples", {"rounds": 3}, resume=False)
    for number, seconds in ((0, 3.0), (2, 1.0)):
        record.run(ALONE, number, "all/32", seconds, [5] * 32)
    record.machine([ALONE], 0, "batch/32", [MACHINE])
    made = rows(variants()[:1], record, FULL, 3, default_spec())
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
        "transformers bf16 (keys and values: no limit)",
    ]


def test_the_figures_are_those_of_the_results():
    folder = Path(__file__).parents[2] / "load" / "results"
    assert (folder / "figures.md").read_text() == figures(folder), "call load/benchmark.py figures"


def _results(folder, **changes):
    """Results as short as may be."""
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


def test_the_figures_show_the_step_that_is_served(tmp_path):
    text = figures(_results(tmp_path))
    (step,) = [line for line in text.splitlines() if line.startswith("- 1 stream")]
    assert step == "- 1 stream: 12.0 ms (floor 10.0); down 2.0 ms (floor 3.0, faster), add_rms_norm 1.0 ms"
    assert f"| {ALONE} | 400 [2 of 3 rounds] |" in text


def test_results_of_other_engines_or_of_few_rounds_are_refused(tmp_path):
    with pytest.raises(ResultsError, match="has 2 rounds, figures need 3"):
        figures(_results(tmp_path, rounds=2))
    today = list(map(about, variants()))
    for others in (today[1:], [{**today[0], "options": {}}, *today[1:]], [*today, {**today[0], "name": ALONE + "!"}]):
        with pytest.raises(ResultsError, match=rf"outdated engines or settings \({ALONE}"):
            figures(_results(tmp_path, variants=others))
    rows_of_profile = json.loads((_results(tmp_path) / "profile.json").read_text())["rows"]
    (tmp_path / "profile.json").write_text(json.dumps({"rows": rows_of_profile[:-1]}))
    with pytest.raises(ResultsError, match=f"no '{REPLAYED}'"):
        figures(tmp_path)
