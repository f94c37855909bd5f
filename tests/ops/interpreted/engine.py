"""The whole engine on the GPU's path, every op a Triton kernel: its greedy tokens are those of the CPU's path."""

import random
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as GgmlType

from kvloom.engine import build
from kvloom.ops.gpu import use_triton_everywhere
from kvloom.planning import dtypes
from kvloom.scheduling.scheduler import Costs
from support.engine_driver import Driver
from support.gpu_on_cpu import Recorder, runner_factory
from support.tiny_models import make_tiny, to_gguf

BLOCK = 16
SETTINGS = {"block_size": BLOCK, "context_length": 96, "max_running": 5, "max_batch_tokens": 24}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    # six query heads for two KV heads of 20: no power of two anywhere
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=6, kv_heads=2, head_dim=20)


@pytest.fixture(autouse=True)
def _swapping_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "measure_costs", lambda *_: Costs(copy_block_s=0.0, compute_token_s=1.0))


def prompt(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module")
def model_in_groups(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In groups of 4 bits, of 32 inputs each, some of which end in the middle of what a kernel reads at once."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny") / "model", heads=3, kv_heads=1, head_dim=32, tied=False)
    return to_gguf(folder, folder / "model.gguf", GgmlType.Q4_1)


def answers(model: Path, weights: str) -> list[list[int]]:
    """Chunks beside decodes, a found prefix, and more sequences than the pool has blocks for."""
    # the interpreter takes its time over quantized products
    longest, blocks = (20, 9) if weights == "fp32" else (8, 8)
    driver = Driver(model, kv_blocks=blocks, weights=weights, **SETTINGS)
    shared = prompt(2 * BLOCK, 1)
    first = driver.submit([*shared, 7], max_tokens=6)[1]
    driver.run()
    asked = [
        driver.submit([*shared, 9, 8], max_tokens=6)[1],
        driver.submit(prompt(1, 2), max_tokens=longest)[1],
        driver.submit(prompt(30, 3), max_tokens=longest)[1],
        driver.submit(prompt(17, 4), max_tokens=longest)[1],
        driver.submit(prompt(40, 5), max_tokens=10, temperature=1.0, seed=3, top_k=20)[1],
    ]
    driver.run()
    stats = driver.engine.stats()
    assert stats.swaps > 0
    assert asked[0].usage.cached_tokens == 2 * BLOCK
    return [answer.ids for answer in (first, *asked)]


@pytest.mark.parametrize("weights", ["fp32", "int8", "int4"])
def test_greedy_tokens_are_the_cpus(model, model_in_groups, monkeypatch, weights):
    # rounding to bf16 is each path's own; with it no two would agree on every token
    monkeypatch.setattr(dtypes, "_native_name", lambda _: "fp32")
    files = model_in_groups if weights == "int4" else model
    use_triton_everywhere(False)
    expected = answers(files, weights)
    use_triton_everywhere(True)
    record = Recorder()
    monkeypatch.setattr(build, "Runner", runner_factory(24, 5, 96, record))
    assert answers(files, weights) == expected
    assert record.replays > 10
