"""The memory planner: its arithmetic against numbers worked out here, and its predictions against running engines."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from io import StringIO

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file

from kvloom.config import Settings
from kvloom.errors import SettingsError
from kvloom.models import gpu_footprint
from kvloom.models.footprint import step_bytes, weights_bytes
from kvloom.models.weights import open_model
from kvloom.ops.linear_float import OneDnnLinear, packed_bytes, packed_dtype
from kvloom.planning.plan import LEAST_HEADROOM, MemoryPlan, plan_memory
from kvloom.planning.report import PlanReport
from support.engine_driver import Driver
from support.readmes import BLOCKS
from support.tiny_models import make_tiny

GIB = 2**30
MIB = 2**20
LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, MLP, VOCAB, CONTEXT = 2, 8, 4, 16, 128, 192, 384, 512
"""Multiples of the tiles of packed weights, so that nothing is padded."""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_tiny(
        tmp_path_factory.mktemp("model"),
        heads=HEADS,
        kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        layers=LAYERS,
        intermediate_size=MLP,
        vocab_size=VOCAB,
        max_position_embeddings=CONTEXT,
    )


@pytest.fixture(scope="module")
def spec(model):
    return open_model(model).spec


def planned(spec, free: int = 4 * GIB, **settings: object) -> MemoryPlan:
    chosen = {"weights": "fp32", "block_size": 16, **settings}
    return plan_memory(spec, Settings.parse({key: str(value) for key, value in chosen.items()}), free)


def run_plan(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", "from kvloom.launcher.cli import main; main()", "plan", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=120)


# --- arithmetic ---


@pytest.mark.parametrize("kv_dtype, size", [("fp32", 4), ("bf16", 2)])
def test_bytes_per_token_and_block(spec, kv_dtype, size):
    plan = planned(spec, weights="bf16", kv_dtype=kv_dtype, kv_blocks=10)
    token = LAYERS * 2 * KV_HEADS * HEAD_DIM * size
    assert (plan.token_bytes, plan.block_bytes) == (token, 16 * token)
    assert plan.pool == 10 * 16 * token


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_plain_weights_are_the_files_tensors(tmp_path, monkeypatch, tied, dtype, native):
    monkeypatch.setattr("kvloom.models.footprint.is_buildable", lambda: native)
    folder = make_tiny(tmp_path, heads=8, kv_heads=4, intermediate_size=MLP, vocab_size=VOCAB, tied=tied)
    stored = sum(tensor.numel() for tensor in load_file(folder / "model.safetensors").values())
    norms = (2 * LAYERS + 1) * HIDDEN
    # torch's packed weights can't be read row by row, which an embedding is
    embedding = VOCAB * HIDDEN if not (tied and native) else 0
    packed = stored - norms - (0 if tied else embedding)
    kept = dtype if native else packed_dtype(dtype)
    expected = packed * kept.itemsize + (norms + embedding) * dtype.itemsize + 256 * HEAD_DIM * 4
    weights = {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]
    assert weights_bytes(open_model(folder).spec, weights, dtype) == expected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(64, 64), (352, 64), (100, 70), (1000, 333), (576, 1536)])
def test_packed_weights_take_what_was_estimated(shape, dtype):
    # how much oneDNN pads depends on the CPU: less than with AVX-512, if at all
    packed = OneDnnLinear(torch.ones(shape, dtype=dtype))._packed
    real = sum(torch.ops.mkldnn._nbytes(part) for part in packed)
    least = shape[0] * shape[1] * dtype.itemsize
    assert least <= real <= packed_bytes(*shape, packed_dtype(dtype))


def test_without_a_compiler_the_scores_of_a_full_chunk_dominate_a_long_context(spec, monkeypatch):
    monkeypatch.setattr("kvloom.models.footprint.is_buildable", lambda: False)
    long = replace(spec, context_length=100_000)
    scores = 2 * HEADS * 512 * 100_000 * 4
    assert scores < step_bytes(long, "fp32", torch.float32, 4, 512, 64, 100_000) < 1.3 * scores


@pytest.mark.parametrize("native, matrices", [(True, 4), (False, 9)])
def test_the_logits_of_all_rows_dominate_a_large_vocabulary(spec, monkeypatch, native, matrices):
    """In C++ those that decode steps are recorded on, too."""
    monkeypatch.setattr("kvloom.models.footprint.is_buildable", lambda: native)
    wide = replace(spec, vocab_size=200_000)
    logits = 64 * 200_000 * 4
    assert matrices * logits < step_bytes(wide, "fp32", torch.float32, 4, 64, 64, 64) < (matrices + 0.1) * logits


def test_each_thread_draws_in_memory_of_its_own(spec, monkeypatch):
    monkeypatch.setattr("kvloom.models.footprint.is_buildable", lambda: True)
    wide = replace(spec, vocab_size=200_000)
    one, four = (planned(wide, kv_blocks=1, threads=threads) for threads in (1, 4))
    assert four.step - one.step == 3 * 200_000 * 12


def test_sizes_units_and_percent(spec):
    block = 16 * LAYERS * 2 * KV_HEADS * HEAD_DIM * 4
    assert planned(spec, kv_memory="1MiB").blocks == MIB // block
    assert planned(spec, kv_memory="1MB").blocks == 1_000_000 // block
    assert planned(spec, kv_memory="60%").blocks == int(0.6 * 4 * GIB) // block
    assert planned(spec, kv_memory="60%", kv_blocks=7).blocks == 7
    assert planned(spec, kv_memory="1MiB", swap_memory="3MiB").swap_blocks == 3 * MIB // block
    assert planned(spec, kv_memory="1MiB", swap_memory="0").swap_blocks == 0
    assert planned(spec, kv_memory="1MiB", retain_memory="0.5MiB").retain_blocks == MIB // 2 // block
    assert planned(spec, kv_memory="1MiB").retain_blocks == 0


def test_sequences_take_whole_blocks(spec):
    plan = planned(spec, kv_blocks=12)
    assert [plan.sequences(length) for length in (1, 16, 17, 64, 65, 192, 193)] == [12, 12, 6, 3, 2, 1, 0]


def test_an_automatic_pool_takes_no_more_than_can_be_in_use(spec):
    assert planned(spec, max_running=3).blocks == 3 * CONTEXT // 16
    assert planned(spec, max_running=3, context_length=100).blocks == 3 * 7
    assert planned(spec, max_running=64, max_batch_tokens=3).blocks == 3 * CONTEXT // 16


@pytest.mark.parametrize("context", [CONTEXT, 8192, 1_000_000])
@pytest.mark.parametrize("free", [1300 * MIB, 1500 * MIB, 2 * GIB, 64 * GIB])
def test_an_automatic_pool_leaves_the_headroom_and_no_whole_block_more(spec, free, context):
    spec = replace(spec, context_length=context)
    plan = planned(spec, free, max_running=60_000, max_batch_tokens=512, swap_memory="256MiB")
    assert plan.headroom == max(free // 10, LEAST_HEADROOM)
    assert plan.swap == 256 * MIB
    assert plan.left >= plan.headroom
    if plan.blocks < plan.max_running * -(-context // 16):
        more = planned(spec, free, max_running=60_000, kv_blocks=plan.blocks + 1, swap_memory="256MiB")
        assert more.left < plan.headroom


def test_swap_memory_comes_out_of_an_automatic_pool(spec):
    long = replace(spec, context_length=8192)

    def blocks(swap: str) -> int:
        return planned(long, 3 * GIB, max_running=500, swap_memory=swap).blocks

    block = planned(spec, kv_blocks=1).block_bytes
    assert blocks("0") - blocks("64MiB") == 64 * MIB // block


@pytest.mark.parametrize(
    "free, settings, message",
    [
        (600 * MIB, {}, "setting kv_memory='auto': no block of 16 KiB"),
        (GIB, {"kv_memory": "2GiB"}, "setting kv_memory='2GiB': takes 2 GiB, but only 1 GiB is free"),
        (GIB, {"kv_memory": "110%"}, "setting kv_memory='110%'"),
        (GIB, {"kv_memory": "1KiB"}, "setting kv_memory='1KiB': is 1 KiB, but one block takes 16 KiB"),
        (GIB, {"kv_memory": "0MiB"}, "setting kv_memory='0MiB'"),
        (GIB, {"kv_blocks": 10**6}, "setting kv_blocks=1000000: takes 15.3 GiB"),
        (GIB, {"kv_memory": "60%"}, "setting swap_memory='512MiB': only 409.6 MiB is free beside the block pool"),
        (GIB, {"kv_memory": "1MiB", "retain_memory": "1MiB"}, "setting retain_memory='1MiB': leaves nothing of the"),
        (GIB, {"context_length": CONTEXT + 1}, "setting context_length=513"),
    ],
)
def test_what_does_not_fit_is_refused(spec, free, settings, message):
    with pytest.raises(SettingsError, match=message):
        planned(spec, free, **settings)


def test_a_pool_that_does_not_fit_says_what_takes_the_memory(spec):
    with pytest.raises(
        SettingsError,
        match="weights take .* products .* a step .* swap_memory 512 MiB, headroom 192 MiB: .* lower swap_m",
    ):
        planned(spec, 700 * MIB)
    assert planned(spec, 700 * MIB, swap_memory="0").blocks > 0


@pytest.mark.parametrize("value", ["", "5", "-1MiB", "auto", "60%", "1TB5", "MiB", "00"])
@pytest.mark.parametrize("name", ["swap_memory", "retain_memory"])
def test_malformed_sizes(name, value):
    with pytest.raises(SettingsError, match=f"setting {name}="):
        Settings.parse({name: value})


def test_parameters_that_are_for_triton_are_no_settings():
    own = ["EXECUTION_ENV_PATH", "FORCE_CPU_ONLY_INPUT_TENSORS", "TRITON_BATCH_STRATEGY_PATH"]
    assert Settings.parse(dict.fromkeys(own, "/some/value")) == Settings()
    with pytest.raises(SettingsError, match="unknown setting 'EXECUTION_ENV'"):
        Settings.parse({"EXECUTION_ENV": "/some/value"})


@pytest.mark.parametrize("products", [0, MIB])
def test_what_takes_nothing_has_no_row(spec, products):
    console = Console(file=StringIO(), width=100)
    PlanReport("a model", replace(planned(spec), products=products), {}, ()).print(console)
    assert ("compiled products, in time" in console.file.getvalue()) == bool(products)


# --- against running engines ---


@pytest.mark.parametrize("kv_memory", ["200KiB", "1MiB"])
@pytest.mark.parametrize("length", [16, 60, 64])
def test_as_many_sequences_run_as_were_predicted_and_no_more(model, spec, kv_memory, length):
    plan = planned(spec, kv_memory=kv_memory, max_running=500)
    fit, new = plan.sequences(length), 8
    assert fit > 1

    def run(count: int) -> tuple[int, int]:
        """Most sequences that ran together, and how many lost their place."""
        driver = Driver(model, kv_blocks=0, kv_memory=kv_memory, max_running=500, max_batch_tokens=4096)
        assert driver.engine.stats().blocks_free == plan.blocks
        # all different from their first token on
        for i in range(count):
            driver.submit([3 + i, *[5] * (length - new - 1)], max_tokens=new)
        together = 0
        while driver.engine.busy:
            driver.engine.step()
            together = max(together, driver.engine.stats().running)
        return together, driver.engine.stats().recomputes

    # the count after a step misses those that ended in it, so that it is the earlier steps' that counts
    assert run(fit) == (fit, 0)
    together, preempted = run(fit + 1)
    assert together <= fit or preempted > 0


def test_the_command_predicts_the_engine(model):
    run = run_plan("--model", model, "--set", "weights=fp32", "--set", "kv_memory=1MiB", "--length", 100, "--json")
    assert run.returncode == 0, run.stderr
    values = json.loads(run.stdout)
    served = next(cache for cache in values["caches"] if cache["kv_dtype"] == values["kv_dtype"])
    driver = Driver(model, kv_blocks=0, kv_memory="1MiB", block_size=32)
    assert served["blocks"] == driver.engine.stats().blocks_free
    assert served["sequences"] == {"100": served["blocks"] // 4}
    other = next(cache for cache in values["caches"] if cache["kv_dtype"] == "bf16")
    assert "weights=fp32 makes the cache fp32 too" in other["error"]


def test_the_command_prints_a_row_per_cache_dtype(model):
    arguments = ("--model", model, "--set", "weights=bf16", "--set", "kv_memory=1MiB", "--length", 32, "--length", 500)
    run = run_plan(*arguments)
    assert run.returncode == 0, run.stderr
    rows = [re.sub(r"\s*│\s*", "|", line).strip("|") for line in run.stdout.splitlines()]
    assert "fp32|full|1 KiB|32 KiB|32|32|2" in rows
    assert "bf16 *|full|512 B|16 KiB|64|64|4" in rows
    assert "at most 64 sequences run at a time" in run.stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--length", 513], "--length 513: the longest sequence has context_length=512 tokens"),
        (["--set", "kv_memory=900TiB"], "setting kv_memory='900TiB'"),
        (["--set", "kv_memry=1GiB"], "unknown setting 'kv_memry'"),
    ],
)
def test_the_command_refuses(model, arguments, message):
    run = run_plan("--model", model, *arguments)
    assert run.returncode == 1
    assert message in run.stderr
    assert "Traceback" not in run.stderr


def test_the_table_in_the_readme_is_the_real_one():
    [(arguments, shown)] = [
        found
        for block in BLOCKS
        for found in re.findall(r"^\$ \.venv/bin/kvloom plan (.*?)\n(.*)", block.text, re.DOTALL | re.MULTILINE)
    ]
    run = run_plan(*arguments.split())
    assert run.returncode == 0, run.stderr
    expected = [line.rstrip() for line in shown.splitlines()]
    assert expected[0] == "..."
    assert [line.rstrip() for line in run.stdout.splitlines()][1 - len(expected) :] == expected[1:]


# --- on a GPU ---


def test_a_gpus_pool_fills_its_memory_and_swap_lies_on_the_host(spec):
    free, host = GIB, 300 * MIB
    chosen = {"device": "cuda:0", "swap_memory": "256MiB", "max_running": 4096, "max_batch_tokens": 4096}
    settings = Settings.parse({key: str(value) for key, value in chosen.items()})
    plan = plan_memory(spec, settings, free, host)
    assert (plan.weights_dtype, plan.kv_dtype) == ("bf16", "bf16")
    # nothing is packed, and a head that is also the embedding is there once
    layer = HIDDEN * (2 * HIDDEN + 2 * KV_HEADS * HEAD_DIM + 3 * MLP + 2)
    assert plan.weights == 2 * (LAYERS * layer + VOCAB * HIDDEN + HIDDEN) + 4 * CONTEXT * HEAD_DIM
    assert plan.headroom <= plan.left < plan.headroom + plan.block_bytes
    assert plan.left == free - plan.weights - plan.products - plan.step - plan.pool
    assert plan.swap > 0.99 * 256 * MIB
    with pytest.raises(SettingsError, match="swap_memory='256MiB': only 200 MiB of host memory"):
        plan_memory(spec, settings, free, 200 * MIB)


def test_a_gpus_step_does_not_grow_with_the_length(spec):
    short, long = (
        gpu_footprint.step_bytes(spec, "bf16", torch.bfloat16, 2, 512, 64, length) for length in (64, 100_000)
    )
    assert short == long
    wide = replace(spec, vocab_size=200_000)
    logits = 64 * 200_000 * 4
    assert 2 * logits < gpu_footprint.step_bytes(wide, "bf16", torch.bfloat16, 2, 64, 64, 64) < 10 * logits
