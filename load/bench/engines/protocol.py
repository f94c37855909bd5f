"""The protocol between the benchmark and an engine's driver: a JSON object per line, over stdin and stdout.

The benchmark sends ``{"load": {"model": path, "options": {...}}}`` once, and then any number of
``{"run": {"prompts": [[id, ...], ...], "new": n}}``. Each gets one reply, ``{"error": text}`` if it failed. The option
``threads`` is the same for all engines. The driver ends when its stdin ends. This module uses only the standard
library, because drivers run in the peers' environments.
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
    """An engine with a loaded model.

    Attributes:
        versions: the versions of its libraries, by name.
        pid: the process that, with its children, holds the model.
    """

    versions: dict[str, str]
    pid: int

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """Answer all prompts at once, greedily, with exactly ``new`` tokens each. Returns the new tokens of each."""

    def close(self) -> None:
        """End the engine and its processes."""


def serve(load: Callable[[str, dict[str, Any]], Engine]) -> None:
    """Execute the requests on stdin. ``load`` gets the model's path and the options of the variant."""
    # The output of libraries goes to stderr
    replies = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # SIGHUP comes if the benchmark was killed while this process was stopped, see Driver
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
