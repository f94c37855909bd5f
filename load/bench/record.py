"""Records the samples line by line in a file, so that an interrupted benchmark can be resumed."""

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
    """The benchmark can't be resumed. The message says why."""


class Record:
    """The samples of a benchmark. Each sample is appended to the file at once.

    Attributes:
        seconds: the seconds of each repetition, by engine, round and run.
        first: the first new token of each prompt of each repetition, by engine, round and run.
        machines: the machine's rates, by engine, round and group: the best of the probes before and after the group.
        probes: all probes in order, each once.
        begun: when the first samples were measured, in ISO 8601.
        versions: versions by engine.
        load_seconds: seconds to load, by engine.
        loaded_rss: bytes before the first prompt, by engine.
        peak_rss: peak bytes, by engine.
        absent: why an engine has no figures, by engine.
    """

    def __init__(self, path: Path, conditions: dict[str, Any], resume: bool):
        """Begin a new record, or resume the existing one.

        Raises:
            RecordError: the existing record has other conditions.
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
        # In the form in which they are read from the file, where tuples are lists
        conditions = json.loads(json.dumps(conditions))
        lines = [json.loads(line) for line in path.read_text().splitlines()] if resume and path.exists() else []
        if lines and lines[0] != conditions:
            names = [name for name in {**lines[0], **conditions} if lines[0].get(name) != conditions.get(name)]
            raise RecordError(
                f"{path} was made under other conditions ({', '.join(names)} differ); start again without --resume"
            )
        if not lines:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(conditions) + "\n")
        for line in lines[1:]:
            self._take(line)
        self._add({"begun": datetime.now(UTC).isoformat(timespec="seconds")})

    def minutes(self) -> float:
        """The minutes spent on measuring until the last line, including earlier interrupted runs."""
        return sum(self._seconds) / 60

    def run(self, engine: str, number: int, run: str, seconds: float, first: list[int]) -> None:
        """Record a run."""
        self._add({"engine": engine, "round": number, "run": run, "seconds": seconds, "first": first})

    def machine(self, engines: Sequence[str], number: int, group: str, probes: Sequence[Machine]) -> None:
        """Record the machine's rates before and after these engines did a group."""
        self._add({"engines": list(engines), "round": number, "group": group, "machine": list(map(asdict, probes))})

    def loaded(self, engine: str, versions: dict[str, str], seconds: float, rss: int) -> None:
        """Record that an engine was loaded."""
        self._add({"engine": engine, "versions": versions, "seconds": seconds, "rss": rss})

    def memory(self, engine: str, peak_rss: int) -> None:
        """Record the peak memory of an engine."""
        self._add({"engine": engine, "peak_rss": peak_rss})

    def without(self, engine: str, why: str) -> None:
        """Record that an engine is not installed or has failed."""
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
            # The probe after a group is also the one before the next group
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
            # The engine could not be loaded in an earlier attempt
            self.absent.pop(engine, None)
        elif "peak_rss" in line:
            self.peak_rss[engine] = max(line["peak_rss"], self.peak_rss.get(engine, 0))
        else:
            self.absent[engine] = line["absent"]


def _lists() -> Any:
    return defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
