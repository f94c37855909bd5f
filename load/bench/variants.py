"""The variants to measure: every engine with every setting, in one list."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from pathlib import Path
from typing import Any

from bench.peers import OWN, Environment, model_path
from kvloom.models.fetch import default_model

KV_GIB = 1
"""Memory of each engine's KV cache, if it can be set. A round's tokens nearly fill it."""

SLOT_TOKENS = 2112
"""Tokens of each of llama.cpp's slots, for the longest case. With one shared cache, each query would read all keys."""

TOKEN_KIB = 22.5
"""Memory of a token's keys and values in 16 bits."""

PREFIX = "it has no prefix cache"
OTHER_CASES = "skipped: only streams of tokens differ"


@dataclass(frozen=True)
class Variant:
    """An engine with its settings.

    Attributes:
        name: its name in tables.
        engine: a module in ``bench.engines``.
        precision: the precision of its weights, a key of ``floors.PRECISIONS``.
        model: the model that its driver loads.
        options: the options of its driver.
        environment: the environment of its driver, see ``peers``.
        max_streams: cases with more prompts at once are skipped.
        skips: kinds of cases that are skipped, and the reasons.
        memory_gib: an upper bound of its memory.
        kv_gib: memory of its KV cache; None if it can't be set.
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
"""The beginning of the names of kvloom's variants."""

ALONE = "kvloom bf16 in-process"
DOORS = ("kvloom bf16 gRPC", "kvloom bf16 gRPC, 50 ms", "kvloom bf16 HTTP")
"""The same engine behind Triton's endpoints. 50 ms is ``stream_interval_ms``."""


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
    # The binary does not know its version
    (pin,) = Environment("llamacpp").pins()
    version = "b" + pin.split("==")[1].split(".")[0]
    options = {"binary": str(binary), "slots": max_streams, "slot_tokens": SLOT_TOKENS, "version": version}
    slow = "each of its slots computes the shared prefix again, which takes minutes"
    kv_gib = max_streams * SLOT_TOKENS * TOKEN_KIB / 2**20
    more: dict[str, Any] = {"skips": {"shared": slow}, "memory_gib": 1.3 + kv_gib, "kv_gib": kv_gib}
    return Variant(name, "llamacpp", precision, model, options, "llamacpp", max_streams, **more)


def variants() -> list[Variant]:
    """All variants, those with 16-bit weights first. The tokens of all others are compared with those of the first.

    Neighbours are in memory together if they fit, see ``together``.
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
        # Keys and values have its default of 8 bits
        _openvino("OpenVINO GenAI int8", "int8", "model-int8", {}),
        _llamacpp("llama.cpp Q4_1", "q4_1", default_model(), max_streams=8),
        _llamacpp("llama.cpp Q4_0", "q4_0", llamacpp / "q4_0.gguf", max_streams=32),
    ]


def about(variant: Variant) -> dict[str, Any]:
    """The variant's description in the results, without paths of this machine."""
    options = {key: value for key, value in variant.options.items() if key != "binary"}
    return {"name": variant.name, "precision": variant.precision, "model": variant.model.name, "options": options}


def together(chosen: Sequence[Variant], memory_gib: float) -> list[list[Variant]]:
    """Split variants into parts of neighbours that fit into this memory together.

    A part has either 16-bit weights or smaller ones. A variant that does not fit alone is in no part.
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
