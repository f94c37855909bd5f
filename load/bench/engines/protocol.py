"""What the benchmark and an engine's driver say to each other: a JSON object per line, over stdin and stdout.

The benchmark sends ``{"load": {"model": path, "options": {...}}}`` once, and then as often as it likes
``{"run": {"prompts": [[id, ...], ...], "new": n}}``; each gets one answer, ``{"error": text}`` if it failed. The option
``threads`` is the same for all engines. The driver ends when its stdin does. Only the standard library: drivers run in
their peers' environments.
"""

import json
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import Any, Protocol

Prompts = list[list[int]]


class Engine(Protocol):
    """An engine that has its model loaded.

    Attributes:
        versions: of what it is made of, by name.
        pid: the process that holds the model, itself or with its children.
    """

    versions: dict[str, str]
    pid: int

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """Answer all prompts at once with exactly ``new`` tokens each, greedily; returns the new tokens of each."""

    def close(self) -> None:
        """End whatever was started."""


def serve(load: Callable[[str, dict[str, Any]], Engine]) -> None:
    """Do what the lines on stdin say. ``load`` takes the model's path and the options of the variant."""
    # what libraries print goes to stderr
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # SIGHUP comes when the benchmark was killed while this process was stopped, see Driver
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(1))
    engine: Engine | None = None
    try:
        for line in sys.stdin:
            message = json.loads(line)
            try:
                if "load" in message:
                    begin = time.perf_counter()
                    engine = load(message["load"]["model"], message["load"]["options"])
                    seconds = time.perf_counter() - begin
                    reply = {"seconds": seconds, "versions": engine.versions, "pid": engine.pid}
                else:
                    assert engine is not None, "load comes first"
                    begin = time.perf_counter()
                    tokens = engine.run(**message["run"])
                    reply = {"seconds": time.perf_counter() - begin, "tokens": tokens}
            except Exception as error:  # noqa: BLE001 the benchmark shows it in the engine's place
                traceback.print_exc()
                reply = {"error": f"{type(error).__name__}: {error}"}
            try:
                print(json.dumps(reply), file=replies, flush=True)
            except BrokenPipeError:
                return  # the benchmark has ended meanwhile
    finally:
        if engine is not None:
            engine.close()
