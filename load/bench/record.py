"""What was measured so far, line by line in a file: a benchmark that was cut goes on where it stopped."""

import json
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.floors import Machine
from bench.probe import best


class RecordError(Exception):
    """The file can't be continued; says why."""


class Record:
    """Appends to the file at once.

    Attributes:
        seconds: by engine, round and run, a number for each repetition.
        first: first new token of each prompt, likewise.
        machines: by engine, round and group: what the machine could do meanwhile, the best of the probes beside it.
        probes: all of them, in order, each once.
        begun: when the first samples were measured, in ISO 8601.
        versions: by engine.
        load_seconds: by engine.
        loaded_rss: bytes by engine, before the first prompt.
        peak_rss: bytes by engine.
        absent: by engine, why it has no figures.
    """

    def __init__(self, path: Path, conditions: dict[str, Any], resume: bool):
        """Begin a new record, or go on with the one that is there.

        Raises:
            RecordError: it was made under other conditions.
        """
        self.seconds: dict[str, dict[int, dict[str, list[float]]]] = _lists()
        self.first: dict[str, dict[int, dict[str, list[list[int]]]]] = _lists()
        self.machines: dict[str, dict[int, dict[str, Machine]]] = defaultdict(lambda: defaultdict(dict))
        self.probes: list[Machine] = []
        self.begun = ""
        self.versions: dict[str, dict[str, str]] = {}
        self.load_seconds: dict[str, float] = {}
        self.loaded_rss: dict[str, int] = {}
        self.peak_rss: dict[str, int] = {}
        self.absent: dict[str, str] = {}
        self._path = path
        self._start = time.monotonic()
        self._seconds = [0.0]
        # as they come back from the file, where tuples are lists
        conditions = json.loads(json.dumps(conditions))
        lines = [json.loads(line) for line in path.read_text().splitlines()] if resume and path.exists() else []
        if lines and lines[0] != conditions:
            names = [name for name in {**lines[0], **conditions} if lines[0].get(name) != conditions.get(name)]
            raise RecordError(
                f"{path} was made under other conditions ({', '.join(names)} differ); begin anew, without --resume"
            )
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(conditions) + "\n")
        for line in lines[1:]:
            self._take(line)
        self._add({"begun": datetime.now(UTC).isoformat(timespec="seconds")})

    def minutes(self) -> float:
        """That were spent on it, also before it was cut, until the last line."""
        return sum(self._seconds) / 60

    def run(self, engine: str, number: int, run: str, seconds: float, first: list[int]) -> None:
        """A run of a round."""
        self._add({"engine": engine, "round": number, "run": run, "seconds": seconds, "first": first})

    def machine(self, engines: Sequence[str], number: int, group: str, probes: Sequence[Machine]) -> None:
        """What the machine could do before and after these engines did the group."""
        self._add({"engines": list(engines), "round": number, "group": group, "machine": list(map(asdict, probes))})

    def loaded(self, engine: str, versions: dict[str, str], seconds: float, rss: int) -> None:
        """An engine is there."""
        self._add({"engine": engine, "versions": versions, "seconds": seconds, "rss": rss})

    def memory(self, engine: str, peak_rss: int) -> None:
        """The most memory that an engine had until now."""
        self._add({"engine": engine, "peak_rss": peak_rss})

    def without(self, engine: str, why: str) -> None:
        """An engine is not there, or has failed."""
        self._add({"engine": engine, "absent": why})

    def _add(self, line: dict[str, Any]) -> None:
        line = {**line, "at": round(time.monotonic() - self._start, 1)}
        with self._path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        self._take(line)

    def _take(self, line: dict[str, Any]) -> None:
        if "begun" in line:
            self.begun = self.begun or line["begun"]
            self._seconds.append(0.0)
        self._seconds[-1] = line["at"]
        if "begun" in line:
            return
        if "machine" in line:
            probes = [Machine(**probe) for probe in line["machine"]]
            machine = best(probes)
            for engine in line["engines"]:
                self.machines[engine][line["round"]][line["group"]] = machine
            # what was measured after a group was also measured before the next one
            self.probes += [probe for probe in probes if probe not in self.probes]
            return
        engine = line["engine"]
        if "run" in line:
            self.seconds[engine][line["round"]][line["run"]].append(line["seconds"])
            self.first[engine][line["round"]][line["run"]].append(line["first"])
        elif "versions" in line:
            self.versions[engine] = line["versions"]
            self.load_seconds[engine] = line["seconds"]
            self.loaded_rss[engine] = line["rss"]
            # what an earlier try lacked may be there now
            self.absent.pop(engine, None)
        elif "peak_rss" in line:
            self.peak_rss[engine] = max(line["peak_rss"], self.peak_rss.get(engine, 0))
        else:
            self.absent[engine] = line["absent"]


def _lists() -> Any:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
