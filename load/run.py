"""Load tests and their batching report.

``run`` tests one server with rising numbers of users, ``compare`` does the same with two configurations. Both start the
servers themselves, on free ports, and write build/reports/NAME.json and NAME.html, with Locust's own pages beside them.
"""

from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any

import typer

from kvloom.repository import parse_assignments
from kvloom_load import report
from kvloom_load.comparisons import COMPARISONS, Comparison, Configuration, serve
from kvloom_load.drive import USERS, Plan, drive
from kvloom_load.figures import Target, add_efficiency, row
from kvloom_load.lengths import DEFAULT_FILE
from kvloom_load.machine import cpu
from kvloom_load.scenarios import SCENARIOS

app = typer.Typer(add_completion=False, no_args_is_help=True, pretty_exceptions_enable=False)

Users = Annotated[str, typer.Option("--users", help="Numbers of users, tested one after the other.", metavar="N,N,...")]
Seconds = Annotated[int, typer.Option(min=2, help="Length of the test of each number of users.")]
User = Annotated[str, typer.Option(help=f"One of {', '.join(USERS)}.")]
Scenario = Annotated[str, typer.Option(help=f"One of {', '.join(SCENARIOS)}.")]
LengthsFile = Annotated[Path, typer.Option(help="JSON file of prompt and answer lengths.", metavar="FILE")]
Assignments = Annotated[list[str] | None, typer.Option("--set", help="A server setting.", metavar="KEY=VALUE")]
Ttft = Annotated[float, typer.Option(help="Target for the first token of a good answer.")]
Itl = Annotated[float, typer.Option(help="Target for the mean time between its tokens.")]
Timeout = Annotated[int, typer.Option(help="Seconds an answer may take.")]
Name = Annotated[str, typer.Option(help="Name of the report.")]
Folder = Annotated[Path, typer.Option(help="Where the report goes.", metavar="DIR")]

REPORTS = Path("build/reports")


@app.command()
def run(
    users: Users = "1,4,16",
    seconds: Seconds = 20,
    user: User = "GrpcUser",
    scenario: Scenario = "steady",
    lengths: LengthsFile = DEFAULT_FILE,
    assignments: Assignments = None,
    ttft_ms: Ttft = Target.ttft_ms,
    itl_ms: Itl = Target.itl_ms,
    answer_timeout: Timeout = Plan.answer_timeout,
    name: Name = "load",
    folder: Folder = REPORTS,
) -> None:
    """Test one server."""
    comparison = Comparison((Configuration(),), scenario, user)
    _test(name, comparison, users, seconds, lengths, assignments, Target(ttft_ms, itl_ms), answer_timeout, folder)


@app.command()
def compare(
    what: Annotated[str, typer.Argument(help=f"One of {', '.join(COMPARISONS)}.", metavar="WHAT")],
    users: Users = "1,8,32",
    seconds: Seconds = 20,
    lengths: LengthsFile = DEFAULT_FILE,
    assignments: Assignments = None,
    ttft_ms: Ttft = Target.ttft_ms,
    itl_ms: Itl = Target.itl_ms,
    answer_timeout: Timeout = Plan.answer_timeout,
    folder: Folder = REPORTS,
) -> None:
    """Test two configurations of the server, one after the other, and show them side by side."""
    if what not in COMPARISONS:
        raise typer.BadParameter(f"{what}: one of {', '.join(COMPARISONS)}")
    target = Target(ttft_ms, itl_ms)
    _test(f"load-{what}", COMPARISONS[what], users, seconds, lengths, assignments, target, answer_timeout, folder)


def _test(
    name: str,
    comparison: Comparison,
    users: str,
    seconds: int,
    lengths: Path,
    assignments: list[str] | None,
    target: Target,
    answer_timeout: int,
    folder: Path,
) -> None:
    settings = parse_assignments(assignments or [])
    plan = Plan(
        comparison.user,
        comparison.scenario,
        seconds,
        lengths,
        answer_timeout=answer_timeout,
        stop_timeout=answer_timeout,
    )
    REPORTS.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    for number, configuration in enumerate(comparison.configurations):
        with serve(configuration, settings) as server:
            for count in map(int, users.split(",")):
                page = REPORTS / f"{name}-locust-{number}-{count}.html"
                rows.append(row(drive(server, plan, count, page), configuration.name, target))
    add_efficiency(rows)
    meta = {
        "name": name,
        "about": f"{comparison.scenario}: {SCENARIOS[comparison.scenario].about}",
        "user": comparison.user,
        "scenario": comparison.scenario,
        "seconds": seconds,
        "model": Path(settings.get("model", "default")).name,
        "settings": settings,
        "configurations": [asdict(configuration) for configuration in comparison.configurations],
        "lengths": lengths.name,
        "target": asdict(target),
        "answer_timeout_s": answer_timeout,
        "seed": plan.seed,
        "cpu": cpu(),
        "versions": {name: version(name) for name in ("kvloom", "locust", "nvidia-pytriton", "torch")},
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    page = report.write(folder, name, meta, rows)
    report.show(rows)
    print(f"report: {page}")


if __name__ == "__main__":
    app()
