"""What is measured: every engine with every setting, in one list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.peers import OWN, Environment, model_path
from kvloom.models.fetch import default_model

KV_GIB = 1
"""Memory for the cache that every engine gets, as far as it can be told. A round's tokens nearly fill it."""

SLOT_TOKENS = 2112
"""Of each of llama.cpp's slots, for the longest case. With one cache for all, each query would look at all keys."""

TOKEN_KIB = 22.5
"""Memory of a token's keys and values in 16 bits."""

PREFIX = "it has no prefix cache"
OTHER_CASES = "left out: only streams of tokens differ"


@dataclass(frozen=True)
class Variant:
    """An engine with its settings.

    Attributes:
        name: in the table.
        engine: module in ``bench.engines``.
        precision: of its weights, a key of ``floors.PRECISIONS``.
        model: what its driver loads.
        options: passed to its driver.
        environment: where its driver runs, see ``peers``.
        most_streams: more prompts at once are left out.
        skips: kinds of cases that it can't do, or that are left out, and why.
        memory_gib: more than it was ever seen to take.
        kv_gib: memory for its cache; None if it can't be told.
    """

    name: str
    engine: str
    precision: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str = OWN
    max_streams: int = 64
    skips: Mapping[str, str] = field(default_factory=dict)
    memory_gib: float = 2.0
    kv_gib: float | None = KV_GIB


IN_PROCESS = {"bf16": "bf16", "int4": "q4_1", "int8": "int8_groups", "w8a8": "w8a8"}
"""kvloom's settings of ``weights``, and their precisions. The default file's 4-bit groups are Q4_1's."""

OWN_NAME = "kvloom "
"""How the names of all of kvloom's variants begin."""

ALONE = "kvloom bf16 in-process"
DOORS = ("kvloom bf16 gRPC", "kvloom bf16 gRPC, 50 ms", "kvloom bf16 HTTP")
"""The same engine behind Triton's doors; 50 ms is ``stream_interval_ms``."""


def _kvloom(weights: str, name: str, engine: str, **more: Any) -> Variant:
    settings = {"device": "cpu", "weights": weights, "kv_memory": f"{KV_GIB}GiB"}
    return Variant(name, engine, IN_PROCESS[weights], default_model(), settings, **more)


def _in_process(weights: str, **more: Any) -> Variant:
    return _kvloom(weights, f"kvloom {weights} in-process", "kvloom_inprocess", memory_gib=1.8, **more)


def _doors() -> list[Variant]:
    grpc, slower, http = DOORS
    others = dict.fromkeys(("prefill", "cold", "warm", "shared"), OTHER_CASES)
    seldom = _kvloom("bf16", slower, "kvloom_grpc", skips=others, max_streams=32)
    seldom = replace(seldom, options={**seldom.options, "stream_interval_ms": 50})
    return [_kvloom("bf16", grpc, "kvloom_grpc"), seldom, _kvloom("bf16", http, "kvloom_http")]


def _openvino(name: str, precision: str, model: str, properties: Mapping[str, str]) -> Variant:
    options = {"kv_gib": KV_GIB, "properties": dict(properties)}
    return Variant(name, "openvino", precision, Environment("openvino").folder / model, options, "openvino")


def _llamacpp(name: str, precision: str, model: Path, max_streams: int = 64) -> Variant:
    binary = Environment("llamacpp").folder / "build" / "bin" / "llama-server"
    # the binary does not know which version it was built from
    (pin,) = Environment("llamacpp").pins()
    version = "b" + pin.split("==")[1].split(".")[0]
    options = {"binary": str(binary), "slots": max_streams, "slot_tokens": SLOT_TOKENS, "version": version}
    slow = "each of its slots computes the shared prefix anew, which takes minutes"
    kv_gib = max_streams * SLOT_TOKENS * TOKEN_KIB / 2**20
    more: dict[str, Any] = {"skips": {"shared": slow}, "memory_gib": 1.3 + kv_gib, "kv_gib": kv_gib}
    return Variant(name, "llamacpp", precision, model, options, "llamacpp", max_streams, **more)


def variants() -> list[Variant]:
    """All of them, those with 16-bit weights first; the first is the one that others' tokens are compared with.

    Neighbours are in memory together as far as they fit, see ``together``: the fastest of the others come first.
    """
    llamacpp = Environment("llamacpp").folder
    bf16 = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    return [
        _in_process("bf16"),
        *_doors(),
        Variant(
            "vLLM bf16",
            "vllm",
            "bf16",
            model_path("bf16"),
            {"dtype": "bfloat16", "kv_gib": KV_GIB},
            "vllm",
            memory_gib=4.5,
        ),
        _openvino("OpenVINO GenAI bf16", "bf16", "model-fp32", bf16),
        _llamacpp("llama.cpp bf16", "bf16", llamacpp / "bf16.gguf"),
        Variant(
            "transformers bf16",
            "transformers",
            "bf16",
            model_path("bf16"),
            {"dtype": "bfloat16"},
            max_streams=32,
            skips={"warm": PREFIX, "shared": PREFIX},
            kv_gib=None,
        ),
        _in_process("int4"),
        _in_process("w8a8"),
        # keys and values stay in its own default then, 8 bits
        _openvino("OpenVINO GenAI int8", "int8", "model-int8", {}),
        _llamacpp("llama.cpp Q4_1", "q4_1", default_model(), max_streams=8),
        _llamacpp("llama.cpp Q4_0", "q4_0", llamacpp / "q4_0.gguf", max_streams=32),
    ]


def about(variant: Variant) -> dict[str, Any]:
    """What the results say of it: nothing that depends on where this machine keeps its files."""
    options = {key: value for key, value in variant.options.items() if key != "binary"}
    return {"name": variant.name, "precision": variant.precision, "model": variant.model.name, "options": options}


def together(chosen: Sequence[Variant], memory_gib: float) -> list[list[Variant]]:
    """Neighbours that fit into so much memory together; 16-bit weights apart from smaller ones.

    One that does not even fit alone is in none.
    """
    fitting = [variant for variant in chosen if variant.memory_gib <= memory_gib]
    parts: list[list[Variant]] = []
    for _, alike in groupby(fitting, lambda variant: variant.precision == "bf16"):
        room = 0.0
        for variant in alike:
            if variant.memory_gib > room:
                parts.append([])
                room = memory_gib
            parts[-1].append(variant)
            room -= variant.memory_gib
    return parts
