"""Computes the figures of the report from the results of a test."""

import itertools
import statistics
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from kvloom_load.arrivals import Arrivals
from kvloom_load.drive import Run
from kvloom_load.scrape import Metrics, TritonStats

PERCENTILES = (50, 95, 99)


@dataclass(frozen=True)
class Target:
    """The latency target of a good answer: maximum TTFT and maximum mean ITL."""

    ttft_ms: float = 2000.0
    itl_ms: float = 200.0

    def met_by(self, answer: Arrivals) -> bool:
        """Whether a complete answer met the target."""
        if answer.ttft is None:
            return False
        gaps = answer.gaps
        return answer.ttft * 1000 <= self.ttft_ms and (not gaps or statistics.fmean(gaps) * 1000 <= self.itl_ms)


def row(run: Run, configuration: str, target: Target) -> dict[str, Any]:
    """The figures of one test."""
    end = run.seen.begin + run.seconds
    outcomes = Counter(answer.outcome for answer in run.seen.answers)
    complete = [answer for answer in run.seen.answers if answer.outcome == "ok"]
    good = [answer for answer in complete if target.met_by(answer)]
    whole, full = run.whole, run.full
    queried = whole.value("kvloom_prefix_tokens_queried_total")
    return {
        "configuration": configuration,
        "users": run.users,
        "seconds": run.seconds,
        **{outcome: outcomes[outcome] for outcome in ("ok", "failed", "cancelled", "cut")},
        "tokens_per_s": round(sum(tokens_in(run.seen.answers, run.seen.begin, end)) / run.seconds, 2),
        "efficiency": None,
        "ttft_ms": summary(answer.ttft for answer in complete if answer.ttft is not None),
        "itl_ms": summary(gap for answer in complete for gap in answer.gaps),
        "e2e_ms": summary(answer.seconds for answer in complete),
        # A share of the answers with a known outcome; cancelled ones do not count
        "good_answers": round(len(good) / max(1, len(complete) + outcomes["failed"]), 4),
        "goodput_per_s": round(sum(answer.end <= end for answer in good) / run.seconds, 3),
        "engine": {
            "ttft_ms": _ms(whole.mean("kvloom_ttft_seconds")),
            "itl_ms": _ms(whole.mean("kvloom_inter_token_seconds")),
            "e2e_ms": _ms(whole.mean("kvloom_e2e_seconds")),
            "queue_ms": _ms(whole.mean("kvloom_queue_seconds")),
            "step_ms": _ms(full.mean("kvloom_step_seconds")),
            "sequences_per_step": _rounded(full.mean("kvloom_step_sequences")),
            "tokens_per_step": _rounded(full.mean("kvloom_step_tokens")),
            "step_sequences": _buckets(full, "kvloom_step_sequences"),
            "step_tokens": _buckets(full, "kvloom_step_tokens"),
            "prefix_hits": round(whole.value("kvloom_prefix_tokens_hit_total") / queried, 4) if queried else None,
            "preemptions": {mode: whole.value("kvloom_preemptions_total", mode=mode) for mode in ("swap", "recompute")},
        },
        "triton": {model: _triton(stats) for model, stats in run.triton.items()},
        "locust": [_locust(entry) for entry in run.seen.statistics],
        "turns": turns(run.seen.answers),
        "conversations": {
            "begun": sum(answer.turn == 1 for answer in run.seen.answers),
            "lost": sum(answer.lost for answer in run.seen.answers),
        },
        "timeline": timeline(run),
        "latencies": latencies(run),
    }


def add_efficiency(rows: Iterable[dict[str, Any]]) -> None:
    """Set ``efficiency``: tokens/s of N users over N times those of one user, if one user was measured."""
    rows = list(rows)
    alone = {row["configuration"]: row["tokens_per_s"] for row in rows if row["users"] == 1}
    for row in rows:
        if alone.get(row["configuration"]):
            row["efficiency"] = round(row["tokens_per_s"] / (row["users"] * alone[row["configuration"]]), 4)


def tokens_in(answers: Iterable[Arrivals], begin: float, end: float) -> Iterable[int]:
    """How many tokens came with each chunk from ``begin`` to ``end``, without those of failed answers."""
    for answer in answers:
        if answer.outcome != "failed":
            for moment, count in zip(answer.times, answer.counts, strict=True):
                if begin <= moment < end:
                    yield count


def summary(seconds: Iterable[float]) -> dict[str, float] | None:
    """Mean and percentiles in milliseconds; None if there are no values."""
    values = sorted(seconds)
    if not values:
        return None
    cuts = statistics.quantiles(values, n=100, method="inclusive") if len(values) > 1 else values * 99
    figures = {"mean": statistics.fmean(values), **{f"p{percent}": cuts[percent - 1] for percent in PERCENTILES}}
    return {name: round(value * 1000, 3) for name, value in figures.items()}


def turns(answers: Iterable[Arrivals]) -> list[dict[str, Any]]:
    """For each turn, over complete answers: TTFT, and the means of all prompt tokens and of the computed ones."""
    by_turn: dict[int, list[Arrivals]] = {}
    for answer in answers:
        if answer.turn and answer.outcome == "ok":
            by_turn.setdefault(answer.turn, []).append(answer)
    return [
        {
            "turn": turn,
            "answers": len(of_turn),
            "ttft_ms": summary(answer.ttft for answer in of_turn if answer.ttft is not None),
            "prompt_tokens": round(statistics.fmean(answer.prompt_tokens for answer in of_turn), 1),
            "computed_tokens": round(
                statistics.fmean(answer.prompt_tokens - answer.cached_tokens for answer in of_turn), 1
            ),
        }
        for turn, of_turn in sorted(by_turn.items())
    ]


def timeline(run: Run) -> dict[str, list[float]]:
    """For each second: tokens that came, and running and waiting requests in the engine's nearest metrics."""
    bins = range(run.seconds)
    looks = [min(run.watch.seen, key=lambda look: abs(look[0] - (run.seen.begin + second + 0.5)))[1] for second in bins]
    return {
        "tokens_per_s": [sum(tokens_in(run.seen.answers, run.seen.begin + s, run.seen.begin + s + 1)) for s in bins],
        "running": [metrics.value("kvloom_requests_running") for metrics in looks],
        "waiting": [metrics.value("kvloom_requests_waiting") for metrics in looks],
    }


def latencies(run: Run) -> dict[str, list[dict[str, float] | None]]:
    """For each second: summaries of the TTFTs and of the times between tokens that ended in it.

    Only complete answers count. None for a second in which nothing came.
    """
    ttft: list[list[float]] = [[] for _ in range(run.seconds)]
    itl: list[list[float]] = [[] for _ in range(run.seconds)]
    for answer in run.seen.answers:
        if answer.outcome != "ok" or answer.ttft is None:
            continue
        gaps = iter(answer.gaps)
        for place, (moment, count) in enumerate(zip(answer.times, answer.counts, strict=True)):
            values = [answer.ttft] if place == 0 else list(itertools.islice(gaps, count))
            second = int(moment - run.seen.begin)
            if 0 <= second < run.seconds:
                (ttft if place == 0 else itl)[second] += values
    return {"ttft_ms": list(map(summary, ttft)), "itl_ms": list(map(summary, itl))}


def _triton(stats: TritonStats) -> dict[str, Any]:
    executions = sum(stats.batches.values())
    requests = sum(size * count for size, count in stats.batches.items())
    return {
        "requests": stats.requests,
        "mean_batch": round(requests / executions, 3) if executions else None,
        "batches": [[size, count] for size, count in stats.batches.items()],
        "queue_ms": _ms(stats.queue_s / stats.requests) if stats.requests else None,
    }


def _locust(entry: dict[str, Any]) -> dict[str, Any]:
    timed = entry["num_requests"] - entry["num_none_requests"]
    return {
        "type": entry["method"],
        "name": entry["name"],
        "requests": entry["num_requests"],
        "failures": entry["num_failures"],
        "mean": round(entry["total_response_time"] / timed, 3) if timed else None,
    }


def _buckets(metrics: Metrics, histogram: str) -> list[list[float | None]]:
    # None means infinity, which JSON does not have
    return [[bound if bound < float("inf") else None, count] for bound, count in metrics.buckets(histogram)]


def _rounded(value: float | None) -> float | None:
    return None if value is None else round(value, 3)


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1000, 3)
