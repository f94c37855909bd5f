"""A model made for far more positions than are served (K08)."""

import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from kvloom.config import Settings
from kvloom.models.spec import rope_inv_freq, rotary_table
from kvloom.models.weights import open_model
from kvloom.planning.plan import plan_memory
from support.tiny_models import edit_config, make_tiny

LONG = 4_194_304
SERVED = 2048
BUILD = """
import sys
from kvloom.config import Settings
from kvloom.engine.build import build_engine
settings = {"model": sys.argv[1], "context_length": sys.argv[2], "kv_blocks": "64", "weights": "fp32", "device": "cpu"}
build_engine(Settings.parse(settings))
print([line for line in open("/proc/self/status") if line.startswith("VmHWM")][0].split()[1])
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=SERVED)


def test_k08_the_plan_counts_what_is_served(folder):
    spec = open_model(folder).spec
    settings = Settings.parse({"model": str(folder), "context_length": str(SERVED), "device": "cpu"})
    longer = plan_memory(replace(spec, context_length=LONG), settings, 1 << 34, None)
    assert longer == plan_memory(spec, settings, 1 << 34, None)
    whole = plan_memory(
        replace(spec, context_length=LONG), settings.model_copy(update={"context_length": LONG}), 1 << 34, None
    )
    assert whole.weights - longer.weights == (LONG - SERVED) * spec.head_dim * 4


@pytest.mark.slow
def test_k08_memory_is_that_of_the_positions_that_are_served(folder):
    def peak(context: int) -> int:
        """Most bytes of a process that has built the engine."""
        command = [sys.executable, "-c", BUILD, str(folder), str(context)]
        return 1024 * int(subprocess.run(command, stdout=subprocess.PIPE, check=True, timeout=300).stdout)

    few = peak(SERVED)
    table = LONG * open_model(folder).spec.head_dim * 4
    edit_config(folder, max_position_embeddings=LONG)
    assert peak(SERVED) - few < table / 4
    # the table, and no second one while it is made
    assert table * 0.9 < peak(LONG) - few < table * 1.4


@pytest.mark.parametrize("positions", [1, 5, 8191, 8192, 20_001])
def test_a_table_made_in_parts_is_the_whole_one(folder, positions):
    spec = replace(open_model(folder).spec, context_length=positions)
    angles = torch.outer(torch.arange(positions, dtype=torch.float32), rope_inv_freq(spec))
    assert torch.equal(rotary_table(spec), torch.cat((angles.cos(), angles.sin()), -1))
