"""The audit of the GPU kernels' machine code: the kernels pass it, and it can fail."""

import pytest

from kvloom_gpu import launches
from kvloom_gpu.audit import Row, audit
from kvloom_gpu.compiling import TARGETS
from kvloom_gpu.launches import Work
from kvloom_gpu.limits import LIMITS, DeviceLimits
from kvloom_gpu.op_launches import op_works
from support.audited_kernels import crowded, large, row_sums

LLAMA_8B = next(shape for shape in launches.SHAPES if shape.name == "D128 G4")
SOME_OPS = {
    "pick 128256",
    "int8 by 32 4096 to 4096, 32 rows",
    "int4 by 32 and minima 4096 to 4096, 1 rows",
    "int4 by 128 4096 to 4096, 64 rows",
    "rows of int8",
}
STREAMING = {"_row_sums": DeviceLimits(wide=0.75, issue_util=0.5)}


def judged(work, target: str = "sm_90", limits=STREAMING) -> Row:
    [row] = audit([Work("test", work)], [target], limits)
    return row


# --- it can tell ---


@pytest.mark.parametrize("target", TARGETS)
def test_a_good_kernel_passes(target):
    row = judged(lambda: row_sums(aligned=True), target)
    assert row.ok, row.faults
    assert row.code.loads_128 >= 4
    assert row.code.wide_share == 1
    assert (row.code.loop > 0) == target.startswith("sm")


def test_narrow_loads_are_found():
    row = judged(lambda: row_sums(aligned=False))
    assert row.code.loads_128 == 0
    assert any(fault.startswith("loads:") for fault in row.faults)
    assert any(fault.startswith("issue slots:") for fault in row.faults)


@pytest.mark.parametrize("target, width", [("sm_80", 256), ("sm_90", 256), ("gfx942", 1024)])
@pytest.mark.slow
def test_spills_are_found(target, width):
    row = judged(lambda: crowded(width), target, {})
    assert row.code.spills > 0
    assert any(fault.startswith("spills:") for fault in row.faults)
    assert not row.values()["ok"]


def test_too_much_shared_memory_is_found():
    assert any("shared memory" in fault for fault in judged(large, "sm_80", {}).faults)


def test_a_missing_matrix_instruction_is_found():
    limits = {"_row_sums": DeviceLimits(mma={"sm_90": ("HGMMA",)})}
    assert judged(lambda: row_sums(aligned=True), limits=limits).faults == ["matrix instruction: None, not HGMMA"]


def test_what_does_not_compile_is_found():
    def broken() -> None:
        raise ValueError("no such kernel")

    assert judged(broken).faults == ["does not compile: no such kernel"]


# --- the kernels ---


def check(rows: list[Row]) -> None:
    assert not [(row.kernel, row.target, row.shape, row.faults) for row in rows if not row.ok]


@pytest.mark.slow
def test_every_kernel_of_a_model_on_hopper():
    ops = [work for work in op_works() if work.shape in SOME_OPS]
    assert len(ops) == len(SOME_OPS)
    rows = audit([*launches.works((LLAMA_8B,)), *ops], ["sm_90"])
    check(rows)
    names = {row.kernel for row in rows}
    assert set(LIMITS) <= names, "a kernel has limits and is not launched"
    assert len(names) >= 9


@pytest.mark.slow
def test_decode_on_every_target():
    works = [work for work in launches.works(launches.SHAPES[:1]) if work.shape.endswith("decode 16")]
    rows = audit(works, [target for target in TARGETS if target != "sm_90"])
    check(rows)
    assert {row.target for row in rows if row.kernel == "_decode_split"} == {"sm_80", "sm_100", "gfx942"}


@pytest.mark.full
def test_every_kernel_at_every_shape_on_every_target():
    check(audit([*launches.works(), *op_works()]))
