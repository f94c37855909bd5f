"""The memory that real processes take, against what the planner says of them."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from test_plan import planned

from kvloom.models.fetch import default_model
from kvloom.models.footprint import SAMPLER_LOGITS
from kvloom.models.weights import open_model
from kvloom.planning.plan import LEAST_HEADROOM

MIB = 2**20

LOAD = """
import json, sys
from pathlib import Path

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

import torch
from support.engine_driver import Driver
from kvloom.models.weights import open_model
before = status("RssAnon")
driver = Driver(sys.argv[1], **json.loads(sys.argv[2]))
loaded = status("RssAnon") - before
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
driver.answer([7] * 2040, max_tokens=2)
print(json.dumps({"loaded": loaded, "peak": status("VmHWM") - status("RssFile") - before}))
"""


KERNELS = """
import sys
from pathlib import Path
import torch
from kvloom.ops.linear_float import OneDnnLinear, kernels_bytes, packed_dtype

def anonymous():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("RssAnon:"))

torch.set_num_threads(1)
dtype = {"fp32": torch.float32, "bf16": torch.bfloat16}[sys.argv[1]]
rows = 100
weights = [torch.ones(shape, dtype=dtype) for shape in ((960, 576), (3072, 576), (576, 1536))]
inputs = {columns: torch.ones(rows, columns, dtype=dtype) for columns in (576, 1536)}
products = [(inputs[weight.shape[1]], OneDnnLinear(weight)) for weight in weights]
OneDnnLinear(torch.ones(64, 64, dtype=dtype))(torch.ones(1, 64, dtype=dtype))  # what comes but once
before = anonymous()
for x, product in products:
    for count in range(1, rows):
        product(x[:count])
print((anonymous() - before) / kernels_bytes([weight.shape[1] for weight in weights], packed_dtype(dtype)))
"""


SAMPLING = """
import sys
from pathlib import Path

def status(name):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(name + ":"))

import torch
from kvloom.models.fetch import cache_folder
from kvloom.ops.native import use_native
from kvloom.request import Request, SamplingParams, Sequence
from kvloom.decoding.sampler import choose

torch.set_num_threads(2)
assert use_native(cache_folder("ops"))
rows, vocab = int(sys.argv[1]), int(sys.argv[2])
params = [{"temperature": 0.0}, {"top_k": 9, "repetition_penalty": 1.2}, *[{"top_p": 0.9}] * (rows - 2)]
sequences = [
    Sequence(Request(id="", prompt_ids=(1, 2), params=SamplingParams(**one), arrival=0.0, logprobs=5))
    for one in params
]
choose(torch.randn(2, 999), sequences[:2])
before = status("RssAnon")
logits = torch.randn(rows, vocab)
logits[-1, 0] = torch.nan
Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew
choose(logits, sequences)
print(status("VmHWM") - status("RssFile") - before)
"""


@pytest.mark.slow
def test_sampling_takes_what_was_planned():
    rows, vocab = 64, 200_000
    command = [sys.executable, "-c", SAMPLING, str(rows), str(vocab)]
    run = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    planned = SAMPLER_LOGITS * rows * vocab * 4 + 2 * vocab * 12
    # no matrix more, and none less
    assert abs(int(run.stdout) - planned) < 0.5 * rows * vocab * 4


@pytest.mark.full
@pytest.mark.parametrize("weights", ["fp32", "bf16"])
def test_compiled_products_take_what_was_estimated(weights):
    run = subprocess.run([sys.executable, "-c", KERNELS, weights], capture_output=True, text=True, timeout=300)
    assert run.returncode == 0, run.stderr
    print(run.stdout)
    assert float(run.stdout) < 1.1


@pytest.mark.full
@pytest.mark.parametrize("weights", ["fp32", "bf16", "w8a8"])
def test_a_process_takes_what_was_planned(weights):
    path = default_model()
    settings = {
        "weights": weights,
        "kv_blocks": 64,
        "block_size": 32,
        "context_length": 2048,
        "max_running": 8,
        "threads": 2,
    }
    run = subprocess.run(
        [sys.executable, "-c", LOAD, path, json.dumps(settings)],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=Path(__file__).parents[1],  # where the driver is
    )
    assert run.returncode == 0, run.stderr
    real = json.loads(run.stdout)
    plan = planned(
        open_model(path).spec, weights=weights, kv_blocks=64, block_size=32, context_length=2048, max_running=8
    )
    print({name: round(size / MIB) for name, size in real.items()}, plan)
    # beside the weights: the tokenizer, what was imported for it, and what the allocator keeps
    assert plan.weights < real["loaded"] < plan.weights + plan.pool + LEAST_HEADROOM
    planned_peak = plan.weights + plan.step + plan.pool
    assert planned_peak - 0.5 * plan.step < real["peak"] < planned_peak + LEAST_HEADROOM
