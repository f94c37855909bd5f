"""What serving costs: the engine in-process against the same engine behind Triton's doors.

Every round runs each number of streams through each door, in turns, so that a noisy machine hits all alike; a figure is
the median over the rounds. Prints a table and writes build/reports/serving_cost.json.
"""

import argparse
import asyncio
import json
import platform
import statistics
import threading
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from kvloom.assemble import assemble
from kvloom.config import Settings
from kvloom.launch import Server
from kvloom.loop import Loop
from kvloom.repository import ModelRepository
from kvloom.request import Delta, Request, SamplingParams
from kvloom_client import AsyncClient, HttpClient

SETTINGS = {"block_size": "32", "kv_blocks": "512", "prefix_cache": "false"}
"""Without prefix reuse: every round sends the same prompts, and all of them shall be computed."""

STREAMS = (1, 8, 32)
DOORS = ("in-process", "grpc", "http")
PROMPT_TOKENS = 128
TARGETS = {"grpc": {1: 0.85, 8: 0.85, 32: 0.80}, "http": {1: 0.85, 8: 0.85, 32: 0.85}}
REPORT = Path("build/reports/serving_cost.json")


def prompt(number: int) -> list[int]:
    """Token ids that no other stream has."""
    return [100 + (7 * number + 13 * position) % 40_000 for position in range(PROMPT_TOKENS)]


def in_process(loop: Loop, streams: int, tokens: int) -> None:
    """Answer ``streams`` prompts at once with the loop alone."""
    left = threading.Semaphore(0)

    def sink(delta: Delta) -> None:
        if delta.final:
            assert delta.error is None, delta.error
            left.release()

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
    for number in range(streams):
        loop.submit(Request(id="", prompt_ids=tuple(prompt(number)), params=params, arrival=time.monotonic()), sink)
    for _ in range(streams):
        left.acquire()


def through_grpc(url: str, streams: int, tokens: int) -> None:
    """The same through `llm`, one response per token."""

    async def one(client: AsyncClient, number: int) -> None:
        stream = client.stream(input_ids=prompt(number), temperature=0.0, max_tokens=tokens, ignore_eos=True)
        got = [len(chunk.token_ids) async for chunk in stream]
        assert got == [1] * tokens, "one response per token"

    async def all_of_them() -> None:
        async with AsyncClient(url) as client:
            await asyncio.gather(*(one(client, number) for number in range(streams)))

    asyncio.run(all_of_them())


def through_http(url: str, streams: int, tokens: int) -> None:
    """The same through `generate`'s server-sent events, whose responses are at least 50 ms apart."""

    def one(number: int) -> None:
        with HttpClient(url) as client:
            stream = client.stream(input_ids=prompt(number), temperature=0.0, max_tokens=tokens, ignore_eos=True)
            assert sum(len(chunk.token_ids) for chunk in stream) == tokens

    threads = [threading.Thread(target=one, args=(number,)) for number in range(streams)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def measure(rounds: int, tokens: int) -> list[dict[str, Any]]:
    """Tokens per second of every door and number of streams; a row each."""
    speeds: dict[tuple[str, int], list[float]] = {(door, n): [] for n in STREAMS for door in DOORS}
    loop = Loop(lambda: assemble(Settings.parse(SETTINGS)).engine)
    with Server.start(ModelRepository(SETTINGS)) as server, Progress(console=Console(stderr=True)) as progress:
        run: dict[str, Callable[[int, int], None]] = {
            "in-process": lambda n, length: in_process(loop, n, length),
            "grpc": lambda n, length: through_grpc(server.grpc_url, n, length),
            "http": lambda n, length: through_http(server.http_url, n, length),
        }
        for door in DOORS:
            run[door](2, 4)
        task = progress.add_task("serving cost", total=rounds * len(speeds))
        for _ in range(rounds):
            for door, streams in speeds:
                begin = time.perf_counter()
                run[door](streams, tokens)
                speeds[door, streams].append(streams * tokens / (time.perf_counter() - begin))
                progress.advance(task)
    loop.stop()
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    return [
        {
            "door": door,
            "streams": streams,
            "tokens_per_s": round(medians[door, streams], 1),
            "of_in_process": round(medians[door, streams] / medians["in-process", streams], 3),
            "target": TARGETS.get(door, {}).get(streams),
            "rounds": [round(value, 1) for value in speeds[door, streams]],
        }
        for door, streams in speeds
    ]


def main() -> None:
    """Measure, print, write."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64, help="tokens per answer")
    arguments = parser.parse_args()
    rows = measure(arguments.rounds, arguments.tokens)
    meta = {
        "prompt_tokens": PROMPT_TOKENS,
        "new_tokens": arguments.tokens,
        "settings": SETTINGS,
        "threads": torch.get_num_threads(),
        "cpu": platform.processor() or platform.machine(),
        "versions": {name: version(name) for name in ("kvloom", "torch", "nvidia-pytriton")},
    }
    REPORT.parent.mkdir(parents=True, exist_ok=True)
    REPORT.write_text(json.dumps({"meta": meta, "rows": rows}, indent=2))
    table = Table("streams", "door", "tokens/s", "of in-process", "target")
    for row in rows:
        target = "" if row["target"] is None else f"{row['target']:.2f}"
        table.add_row(
            str(row["streams"]), row["door"], f"{row['tokens_per_s']:.1f}", f"{row['of_in_process']:.2f}", target
        )
    Console().print(table)


if __name__ == "__main__":
    main()
