"""Load tests and their batching report.

``run`` tests one server with increasing numbers of users. ``compare`` tests several configurations. Both start their
servers on free ports and write build/reports/NAME.json and NAME.html, and Locust's own pages in the same folder.
"""

import subprocess
import sys
from dataclasses import asdict, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.errors import KvloomError
from kvloom.launcher.repository import ModelRepository, parse_assignments
from kvloom_client import KvloomClientError
from kvloom_load import report
from kvloom_load.comparisons import COMPARISONS, Comparison, ComparisonName, Configuration, serve
from kvloom_load.counts import counts
from kvloom_load.drive import TALK, LoadPlan, UserName, drive
from kvloom_load.figures import Target, add_efficiency, row
from kvloom_load.lengths import DEFAULT_FILE, read_kinds
from kvloom_load.machine import cpu
from kvloom_load.progress import Progress
from kvloom_load.scenarios import SCENARIOS, ScenarioName

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

Users = Annotated[str, typer.Option("--users", help="Numbers of users, tested one after the other.", metavar="N,N,...")]
Seconds = Annotated[int, typer.Option(min=2, help="Seconds of the test with each number of users.")]
LengthsFile = Annotated[
    Path,
    typer.Option(help="JSON file of prompt and answer lengths.", metavar="FILE", exists=True, dir_okay=False),
]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="A server setting.", metavar="KEY=VALUE")]
Ttft = Annotated[float, typer.Option(min=0, help="Maximum time to first token of a good answer.")]
Itl = Annotated[float, typer.Option(min=0, help="Maximum mean time between tokens of a good answer.")]
Timeout = Annotated[int, typer.Option(min=1, help="Maximum seconds of an answer.")]
Turns = Annotated[int, typer.Option(min=1, help="Turns of a chat or a conversation.")]
Thinking = Annotated[float, typer.Option("--thinking-s", min=0, help="Mean seconds between turns.")]
Name = Annotated[str | None, typer.Option(help="Name of the report.", show_default="load-SCENARIO-USER")]
Folder = Annotated[Path, typer.Option(help="Folder of the report.", metavar="DIR", file_okay=False)]

REPORTS = Path("build/reports")


@app.command()
def run(
    users: Users = "1,4,16",
    seconds: Seconds = 20,
    user: Annotated[UserName, typer.Option(help="Class of the users.")] = "GrpcUser",
    scenario: Annotated[ScenarioName, typer.Option(help="Scenario of the test.")] = "steady",
    lengths: LengthsFile = DEFAULT_FILE,
    assignments: Assignments = None,
    ttft_ms: Ttft = Target.ttft_ms,
    itl_ms: Itl = Target.itl_ms,
    answer_timeout: Timeout = LoadPlan.answer_timeout,
    turns: Turns = LoadPlan.turns,
    thinking_s: Thinking = LoadPlan.thinking_s,
    name: Name = None,
    folder: Folder = REPORTS,
) -> None:
    """Test one server."""
    comparison = Comparison((Configuration(),), scenario, user)
    plan = _plan(comparison, seconds, lengths, answer_timeout, turns, thinking_s)
    name = name or f"load-{scenario}-{user}"
    _test(name, comparison, users, plan, assignments, Target(ttft_ms, itl_ms), folder)


@app.command()
def compare(
    what: Annotated[ComparisonName, typer.Argument(help="The comparison.", metavar="WHAT")],
    users: Users = "1,8,32",
    seconds: Seconds = 20,
    lengths: LengthsFile = DEFAULT_FILE,
    assignments: Assignments = None,
    ttft_ms: Ttft = Target.ttft_ms,
    itl_ms: Itl = Target.itl_ms,
    answer_timeout: Timeout = LoadPlan.answer_timeout,
    turns: Turns = LoadPlan.turns,
    thinking_s: Thinking = LoadPlan.thinking_s,
    folder: Folder = REPORTS,
) -> None:
    """Test several configurations of the server, one after the other, and compare them in one report."""
    comparison = COMPARISONS[what]
    plan = _plan(comparison, seconds, lengths, answer_timeout, turns, thinking_s)
    _test(f"load-{what}", comparison, users, plan, assignments, Target(ttft_ms, itl_ms), folder)


def _plan(
    comparison: Comparison, seconds: int, lengths: Path, answer_timeout: int, turns: int, thinking_s: float
) -> LoadPlan:
    return LoadPlan(
        comparison.user,
        comparison.scenario,
        seconds,
        lengths,
        answer_timeout=answer_timeout,
        stop_timeout=answer_timeout,
        turns=turns,
        thinking_s=thinking_s,
    )


def _test(
    name: str,
    comparison: Comparison,
    users: str,
    plan: LoadPlan,
    assignments: list[str] | None,
    target: Target,
    folder: Path,
) -> None:
    numbers = counts(users, "--users")
    settings = parse_assignments(assignments or [])
    _check(comparison, plan.lengths, settings)
    REPORTS.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    progress = Progress(plan, numbers, len(comparison.configurations))
    for number, configuration in enumerate(comparison.configurations):
        with serve(configuration, settings) as server:
            for count in numbers:
                page = REPORTS / f"{name}-locust-{number}-{count}.html"
                chosen = replace(plan, user=configuration.user or plan.user)
                rows.append(row(drive(server, chosen, count, page), configuration.name, target))
                progress.finished(rows[-1])
    add_efficiency(rows)
    meta = {
        "name": name,
        "about": f"{comparison.scenario}: {SCENARIOS[comparison.scenario].about}",
        "user": comparison.user,
        "scenario": comparison.scenario,
        "seconds": plan.seconds,
        "model": Path(settings.get("model", "default")).name,
        "settings": settings,
        "configurations": [asdict(configuration) for configuration in comparison.configurations],
        "lengths": plan.lengths.name,
        "target": asdict(target),
        "answer_timeout_s": plan.answer_timeout,
        "turns": plan.turns,
        "thinking_s": plan.thinking_s,
        "seed": plan.seed,
        "cpu": cpu(),
        "versions": {name: version(name) for name in ("kvloom", "locust", "nvidia-pytriton", "torch")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    page = report.write(folder, name, meta, rows)
    report.show(rows)
    print(f"report: {page}")


def _check(comparison: Comparison, lengths: Path, settings: dict[str, str]) -> None:
    """Check the arguments before a server is started.

    Raises:
        typer.BadParameter: a kind of lengths is missing, or a setting is one that the comparison sets.
        KvloomError: a server would refuse its settings or its model.
    """
    try:
        kinds = read_kinds(lengths)
    except ValueError as error:
        raise typer.BadParameter(str(error), param_hint="'--lengths'") from error
    mix = [name for name, _ in SCENARIOS[comparison.scenario].mix]
    for kind in ["turn"] if comparison.user in TALK else mix:
        if kind not in kinds:
            raise typer.BadParameter(f"{lengths}: the kind {kind!r} is missing", param_hint="'--lengths'")
    for configuration in comparison.configurations:
        for key in configuration.settings.keys() & settings:
            raise typer.BadParameter(f"{key} is set by the comparison", param_hint="'--set'")
        ModelRepository({**settings, **configuration.settings})


def main() -> None:
    """Run the command. Known errors become a message and exit code 1."""
    try:
        app()
    except (KvloomError, KvloomClientError) as error:
        sys.exit(f"load: {error}")
    except subprocess.CalledProcessError as error:
        sys.exit(f"load: Locust failed with exit code {error.returncode}; see its output above")


if __name__ == "__main__":
    main()
