"""What is measured: every engine with every setting, in one list."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.peers import OWN, Environment, model_path
from kvloom.fetch import default_model

KV_GIB = 2
"""Memory for the cache that every engine gets, as far as it can be told."""

KV_TOKENS = 92 * 1024
"""The same in tokens: 22.5 KiB each in 16 bits."""

PREFIX = "it has no prefix cache"


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
        most_streams: more prompts at once would take minutes.
        skips: kinds of cases that it can't do, and why.
    """

    name: str
    engine: str
    precision: str
    model: Path
    options: Mapping[str, Any] = field(default_factory=dict)
    environment: str = OWN
    most_streams: int = 64
    skips: Mapping[str, str] = field(default_factory=dict)


IN_PROCESS = {"bf16": "bf16", "int4": "q4_1", "int8": "int8_groups", "w8a8": "w8a8"}
"""kvloom's settings of ``weights``, and their precisions. The default file's 4-bit groups are Q4_1's."""

_DOORS = {"gRPC": "kvloom_grpc", "HTTP": "kvloom_http"}

DOORS = {f"kvloom bf16 {door}": "kvloom bf16 in-process" for door in _DOORS}
"""The engine alone, by the name of the same engine behind one of Triton's doors."""


def _kvloom(weights: str, door: str, engine: str) -> Variant:
    settings = {"device": "cpu", "weights": weights, "kv_memory": f"{KV_GIB}GiB"}
    return Variant(f"kvloom {weights} {door}", engine, IN_PROCESS[weights], default_model(), settings)


def _llamacpp(name: str, precision: str, model: Path, most_streams: int = 64) -> Variant:
    binary = Environment("llamacpp").folder / "build" / "bin" / "llama-server"
    options = {"binary": str(binary), "kv_tokens": KV_TOKENS, "arguments": []}
    slow = "each of its slots computes the shared prefix anew, which takes minutes"
    return Variant(name, "llamacpp", precision, model, options, "llamacpp", most_streams, {"shared": slow})


def variants() -> list[Variant]:
    """All of them; the first is the one that others' tokens are compared with."""
    openvino, llamacpp = Environment("openvino").folder, Environment("llamacpp").folder
    exact = {"INFERENCE_PRECISION_HINT": "bf16", "KV_CACHE_PRECISION": "bf16"}
    return [
        *(_kvloom(weights, "in-process", "kvloom_inprocess") for weights in IN_PROCESS),
        *(_kvloom("bf16", door, engine) for door, engine in _DOORS.items()),
        Variant(
            "transformers bf16",
            "transformers",
            "bf16",
            model_path("bf16"),
            {"dtype": "bfloat16"},
            skips={"warm": PREFIX, "shared": PREFIX},
        ),
        Variant("vLLM bf16", "vllm", "bf16", model_path("bf16"), {"dtype": "bfloat16", "kv_gib": KV_GIB}, "vllm"),
        Variant(
            "OpenVINO GenAI bf16",
            "openvino",
            "bf16",
            openvino / "model-fp32",
            {"kv_gib": KV_GIB, "properties": exact},
            "openvino",
        ),
        Variant(
            "OpenVINO GenAI int8",
            "openvino",
            "int8",
            openvino / "model-int8",
            {"kv_gib": KV_GIB, "properties": {"KV_CACHE_PRECISION": "bf16"}},
            "openvino",
            most_streams=32,
        ),
        _llamacpp("llama.cpp bf16", "bf16", llamacpp / "bf16.gguf"),
        _llamacpp("llama.cpp Q4_1", "q4_1", default_model(), most_streams=8),
        _llamacpp("llama.cpp Q4_0", "q4_0", llamacpp / "q4_0.gguf", most_streams=32),
    ]
