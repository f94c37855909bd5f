"""Benchmark against other engines.

``run`` measures kvloom, in-process and behind its endpoints, and all peers that are set up, and writes
build/reports/bench.json, .md and .svg. ``peers`` sets the peers up. ``profile`` measures the parts of a step.
``figures`` writes the main figures into load/results/figures.md.
"""

import json
import signal
import sys
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from bench import probe, profile_step, results, setup_peers, tables
from bench.cases import FULL, QUICK
from bench.code import code_version
from bench.compare import comparisons
from bench.figures import ResultsError
from bench.figures import figures as main_figures
from bench.measure import Measurement, MemoryShortError
from bench.plot import draw
from bench.probe import Probe
from bench.prompts import PromptSource
from bench.record import Record, RecordError
from bench.variants import IN_PROCESS, Variant, about, variants
from kvloom.config import Settings
from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom_load.counts import counts
from kvloom_load.machine import cpu

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

REPORTS = Path("build/reports")
RESULTS = Path(__file__).parent / "results"

PROFILE_REPEATS = 20

Folder = Annotated[Path, typer.Option(help="Folder of the results.", metavar="DIR")]


@app.command()
def run(
    only: Annotated[
        list[str] | None,
        typer.Option(help="Only engines with this name or prefix. May be repeated.", metavar="NAME"),
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, help="How often each case is run. Figures are medians.")] = 3,
    quick: Annotated[
        bool, typer.Option(help="A few tokens in each case, to check that everything works. Ignore the figures.")
    ] = False,
    memory: Annotated[
        float | None,
        typer.Option(
            help="Memory for engines. As many as fit are loaded together. Default: most of the available memory.",
            metavar="GIB",
        ),
    ] = None,
    resume: Annotated[bool, typer.Option(help="Resume an interrupted benchmark.")] = False,
    name: Annotated[str, typer.Option(help="Name of the files.")] = "bench",
    folder: Folder = REPORTS,
) -> None:
    """Measure and write the results."""
    scale = QUICK if quick else FULL
    chosen = _chosen(only)
    spec = GgufFile(default_model()).spec
    conditions = {
        "scale": asdict(scale),
        "rounds": rounds,
        "cpu": cpu(),
        "code": code_version(),
        # All variants, because other ones may be chosen with --resume
        "variants": list(map(about, variants())),
    }
    progress = Console(stderr=True)
    try:
        record = Record(REPORTS / f"{name}.samples.jsonl", conditions, resume)
        Measurement(scale, rounds, record, PromptSource.default(), progress, memory).run(chosen)
    except (MemoryShortError, RecordError) as error:
        progress.print(str(error), markup=False)
        raise typer.Exit(1) from None
    machines = results.machines(record)
    rows: list[dict[str, Any]] = []
    if machines:
        rows += results.rows(chosen, record, scale, rounds, spec)
        rows += results.floor_rows(chosen, scale, probe.median(machines), spec)
    meta: dict[str, Any] = {
        "date": record.begun,
        "minutes": round(record.minutes(), 1),
        "code": conditions["code"],
        "cpu": cpu(),
        "rounds": rounds,
        "scale": asdict(scale),
        "model": default_model().name,
        "probes": len(record.probes),
        "machine": probe.spread(record.probes) if machines else {},
        "seconds": results.seconds(chosen, record),
        "variants": list(map(about, chosen)),
        "versions": record.versions,
    }
    compared = comparisons(rows)
    if quick:
        meta["quick"] = tables.QUICK
    _write(folder, name, meta, rows, compared)
    tables.show(rows, compared, tables.console())
    tables.warn(probe.unsteady(record.probes) if machines else [], rounds, tables.console())
    if quick:
        print(tables.QUICK)
    print(f"results: {folder / name}.json, .md, .svg")


@app.command()
def figures(
    folder: Annotated[Path, typer.Option(help="Folder of bench.json and profile.json.", metavar="DIR")] = RESULTS,
) -> None:
    """Write the main figures into figures.md in the same folder."""
    try:
        text = main_figures(folder)
    except ResultsError as error:
        Console(stderr=True).print(str(error), markup=False)
        raise typer.Exit(1) from None
    (folder / "figures.md").write_text(text)
    print(f"{folder / 'figures.md'}: written")


@app.command()
def peers(
    names: Annotated[list[str] | None, typer.Argument(help="Only these peers.", metavar="[NAME]...")] = None,
) -> None:
    """Set up missing peers, each in a separate environment."""
    unknown = sorted(set(names or ()) - set(setup_peers.STEPS))
    if unknown:
        raise typer.BadParameter(f"{unknown[0]}: one of {', '.join(setup_peers.STEPS)}")
    if not setup_peers.set_up(names or tuple(setup_peers.STEPS)):
        raise typer.Exit(1)


@app.command()
def profile(
    weights: Annotated[str, typer.Option(help="The setting weights.")] = "bf16",
    streams: Annotated[str, typer.Option(help="Numbers of streams to profile.", metavar="N,N,...")] = "1,32",
    name: Annotated[str, typer.Option(help="Name of the file.")] = "profile",
    folder: Folder = REPORTS,
) -> None:
    """Measure the time of each part of a decode step."""
    if weights not in IN_PROCESS:
        raise typer.BadParameter(f"--weights {weights}: one of {', '.join(IN_PROCESS)}")
    numbers = counts(streams, "--streams")
    spec = GgufFile(default_model()).spec
    progress = Console(stderr=True)
    progress.print("measuring the machine; the profile takes about two minutes")
    with Probe() as process:
        before = process.measure(PROFILE_REPEATS)
    settings = Settings.parse({"device": "cpu", "weights": weights, "kv_memory": "512MiB"})
    profiles = profile_step.profile(settings, numbers, lambda what: progress.print(what, markup=False))
    progress.print("measuring the machine again")
    with Probe() as process:
        after = process.measure(PROFILE_REPEATS)
    machine = probe.best([before, after])
    rows = profile_step.rows(profiles, spec, machine, settings)
    meta: dict[str, Any] = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "cpu": cpu(),
        "model": default_model().name,
        "weights": weights,
        "prompt_tokens": profile_step.PROMPT,
        "new_tokens": profile_step.NEW,
        "code": code_version(),
        "floors": asdict(machine),
        "unsteady": probe.unsteady([before, after]),
    }
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows}, indent=1))
    tables.show_profile(rows, tables.console())
    tables.warn(meta["unsteady"], 1, tables.console())
    print(f"results: {folder / name}.json")


def _chosen(names: list[str] | None) -> list[Variant]:
    """The variants with one of these names, or if a name does not exist, those whose names begin with it."""
    everything = variants()
    if names is None:
        return everything
    found: set[str] = set()
    for name in names:
        begin_so = {variant.name for variant in everything if variant.name.lower().startswith(name.lower())}
        if not begin_so:
            raise typer.BadParameter(f"--only {name}: known are {', '.join(v.name for v in everything)}")
        found |= {one for one in begin_so if one.lower() == name.lower()} or begin_so
    return [variant for variant in everything if variant.name in found]


def _write(
    folder: Path, name: str, meta: dict[str, Any], rows: list[dict[str, Any]], compared: list[dict[str, Any]]
) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps({"meta": meta, "rows": rows, "compared": compared}, indent=1))
    (folder / f"{name}.md").write_text(tables.markdown(meta, rows, compared))
    draw(rows, folder / f"{name}.svg")


if __name__ == "__main__":
    # SIGTERM must also end the engines
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    app()
