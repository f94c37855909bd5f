"""The default model's shape and a machine's rates, for the tests of the benchmark."""

import functools

from bench.floors import Machine
from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom.models.spec import ModelSpec

MACHINE = Machine(bytes_per_s=26e9, operations={"fp32": 230e9, "bf16": 460e9, "int8": 920e9})


@functools.cache
def default_spec() -> ModelSpec:
    """The default model's shape."""
    return GgufFile(default_model()).spec
