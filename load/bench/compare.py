"""Compares engines, from the rows of bench.json. A ratio above 1 means that the first engine is better.

A ratio is that of the medians. The minimum and maximum of the rounds' ratios are given with it. If both engines were in
memory at the same time, they did a round's case within seconds of each other.
"""

from collections.abc import Iterator, Sequence
from typing import Any

from bench.variants import ALONE, DOORS, OWN_NAME

Row = dict[str, Any]

PEERS, SERVED, BEST, DEFAULT_FILE, DOOR, MORE = (
    "bf16 against peers",
    "served bf16 against peers",
    "best against best",
    "default file",
    "doors",
    "more streams",
)
"""The kinds of comparisons, see ``comparisons``."""

LLAMACPP_DEFAULT_FILE = "llama.cpp Q4_1"
IN_PROCESS_NAME = " in-process"
PEAK = ("peak_rss", None)


def comparisons(made: Sequence[Row]) -> list[Row]:
    """A row for each comparison and case.

    - PEERS: kvloom's bf16 against every peer's bf16, and against the best peer of each case.
    - SERVED: kvloom's bf16 over gRPC against the best peer.
    - BEST: kvloom's best setting against the best peer, with any weights.
    - DEFAULT_FILE: kvloom's best setting against llama.cpp, which uses the 4-bit default file unchanged.
    - DOOR: kvloom behind an endpoint against the engine in-process.
    - MORE: kvloom's settings with the largest number of streams against the second largest.

    Peak memory is compared only with peers that do not use more memory for keys and values than kvloom. These rows have
    ``kv_mib`` with this memory of both engines.
    """
    kv = {row["engine"]: row["value"] for row in made if row.get("case") == "kv_memory"}
    by_case: dict[tuple[str, int | None], dict[str, Row]] = {}
    for row in made:
        if "value" in row and row["case"] in COMPARED and not row["engine"].startswith("floor "):
            by_case.setdefault((row["case"], row["size"]), {})[row["engine"]] = row
    peak = by_case.get(PEAK, {})
    most = kv.get(ALONE)
    if most is not None:
        by_case[PEAK] = {name: row for name, row in peak.items() if kv.get(name, most) <= most}
    compared = [row for here in by_case.values() for row in _of_case(here)] + list(_more(by_case))
    for row in compared:
        if (row["case"], row["size"]) == PEAK:
            row["kv_mib"] = [kv.get(row["engine"]), kv.get(row["against"])]
    return compared


COMPARED = ("decode", "total", "prefill", "ttft_cold", "ttft_warm", "shared", "peak_rss")


def _of_case(here: dict[str, Row]) -> Iterator[Row]:
    own = {name: row for name, row in here.items() if name.startswith(OWN_NAME)}
    inside = {name: row for name, row in own.items() if name.endswith(IN_PROCESS_NAME)}
    peers = {name: row for name, row in here.items() if name not in own}
    alone = own.get(ALONE)
    if alone is not None:
        alike = [row for row in peers.values() if row["precision"] == alone["precision"]]
        for row in alike:
            yield _ratio(PEERS, alone, row)
        if alike:
            yield {**_ratio(PEERS, alone, _best(alike)), "best": True}
        # The memory of a server is not comparable with that of an engine
        if alike and DOORS[0] in own and alone["case"] != "peak_rss":
            yield _ratio(SERVED, own[DOORS[0]], _best(alike))
        if alone["case"] in ("decode", "total"):
            for door in DOORS:
                if door in own:
                    yield _ratio(DOOR, own[door], alone)
    if inside and peers:
        yield _ratio(BEST, _best(list(inside.values())), _best(list(peers.values())))
    if inside and LLAMACPP_DEFAULT_FILE in peers:
        yield _ratio(DEFAULT_FILE, _best(list(inside.values())), peers[LLAMACPP_DEFAULT_FILE])


def _more(by_case: dict[tuple[str, int | None], dict[str, Row]]) -> Iterator[Row]:
    sizes = sorted(size for case, size in by_case if case == "total" and size is not None)
    if len(sizes) < 2:
        return
    most, before = by_case["total", sizes[-1]], by_case["total", sizes[-2]]
    for name, row in most.items():
        if name.endswith(IN_PROCESS_NAME) and name in before:
            yield {**_ratio(MORE, row, before[name]), "than": sizes[-2]}


def _less_is_better(row: Row) -> bool:
    return row["unit"] in ("ms", "MiB")


def _best(of: Sequence[Row]) -> Row:
    return (min if _less_is_better(of[0]) else max)(of, key=lambda row: row["value"])


def _ratio(what: str, first: Row, other: Row) -> Row:
    def ratio(one: float, two: float) -> float:
        return round(two / one if _less_is_better(first) else one / two, 3)

    pairs = zip(first.get("rounds", ()), other.get("rounds", ()), strict=False)
    rounds = [ratio(one, two) for one, two in pairs if one and two]
    return {
        "what": what,
        "case": first["case"],
        "size": first["size"],
        "engine": first["engine"],
        "against": other["engine"],
        "ratio": ratio(first["value"], other["value"]),
        "rounds": [min(rounds), max(rounds)] if len(rounds) > 1 else None,
    }
