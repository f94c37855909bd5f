"""How many threads a step has: what a process's affinity and its CPU quota allow."""

import os
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from kvloom.config import Settings
from kvloom.cores import usable_cores
from support.control_groups import group, lay_out

CORES = len(os.sched_getaffinity(0))
FREE = -1.0
"""No quota."""

several = pytest.mark.skipif(CORES < 2, reason="a quota says nothing where there is one core")


def v1(folder: Path, cpus: float, period_us: int = 100_000) -> Path:
    quota_us = -1 if cpus == FREE else int(cpus * period_us)
    return group(folder, cpu__cfs_quota_us=quota_us, cpu__cfs_period_us=period_us)


def v2(folder: Path, cpus: float, period_us: int = 100_000) -> Path:
    return group(folder, cpu__max=f"{'max' if cpus == FREE else int(cpus * period_us)} {period_us}")


@pytest.fixture(params=["version 1", "version 2"])
def system(request, tmp_path):
    """The folder of the groups, what writes a quota, and what puts the process into a group and returns the root."""
    lay_out(tmp_path, "cpu")
    is_v1 = request.param == "version 1"

    def place(path: str) -> Path:
        (tmp_path / "proc/self/cgroup").write_text(f"5:memory:/\n4:cpu:{path}\n" if is_v1 else f"0::{path}\n")
        return tmp_path

    base = tmp_path / "sys/fs/cgroup"
    return (base / "cpu", v1, place) if is_v1 else (base, v2, place)


@several
@pytest.mark.parametrize("cpus, count", [(0.1, 1), (1.0, 1), (1.5, 1), (1.99, 1), (CORES, CORES), (FREE, CORES)])
def test_as_many_cores_as_the_quota_pays_for(system, cpus, count):
    base, quota, place = system
    quota(base / "pod" / "box", cpus)
    assert usable_cores(place("/pod/box")).count == count


@several
def test_a_quota_of_an_outer_group_counts_and_is_named(system):
    base, quota, place = system
    quota(base, FREE)
    quota(base / "pod", 1.25, period_us=50_000)
    quota(base / "pod" / "box", FREE)
    cores = usable_cores(place("/pod/box"))
    assert (cores.count, cores.why) == (1, f"the CPU quota of {base / 'pod'} is 1.25 CPUs")


@several
@pytest.mark.parametrize("path", ["/", "/docker/0123abc", "/../../other"])
def test_inside_a_container_its_group_is_the_root(system, path):
    base, quota, place = system
    quota(base, 1.0)
    assert usable_cores(place(path)).count == 1


@several
@pytest.mark.parametrize("write, membership", [(v1, "4:cpu,cpuacct:/box/in"), (v2, "0::/box/in")])
def test_of_a_mount_that_shows_a_part_the_path_goes_on_from_there(tmp_path, write, membership):
    lay_out(tmp_path, "cpu", mount_root="/box")
    (tmp_path / "proc/self/cgroup").write_text(f"{membership}\n")
    write(tmp_path / ("sys/fs/cgroup/cpu/in" if write is v1 else "sys/fs/cgroup/in"), 1.0)
    assert usable_cores(tmp_path).count == 1


@several
def test_a_mount_point_may_have_a_blank(tmp_path):
    lay_out(tmp_path, "cpu")
    mounts = tmp_path / "proc/self/mountinfo"
    mounts.write_text(mounts.read_text().replace("/sys/fs/cgroup", r"/sys/my\040groups"))
    (tmp_path / "proc/self/cgroup").write_text("0::/box\n")
    v2(tmp_path / "sys/my groups/box", 1.0)
    assert usable_cores(tmp_path).count == 1


def test_without_control_groups_the_affinity_decides(tmp_path):
    assert usable_cores(tmp_path).count == CORES
    allowed = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, {min(allowed)})
        assert usable_cores(tmp_path).count == Settings().step_threads == 1
        assert Settings(threads=3).step_threads == 3
    finally:
        os.sched_setaffinity(0, allowed)


IN_GROUP = """
import sys
from pathlib import Path
(Path(sys.argv[1]) / "cgroup.procs").write_text("0")
from kvloom.config import Settings
print(Settings().step_threads)
"""


@several
def test_a_quota_of_this_system_counts():
    box = Path(f"/sys/fs/cgroup/cpu/kvloom-test-{uuid.uuid4().hex[:8]}")
    inner = box / "inner"
    try:
        inner.mkdir(parents=True)
    except OSError as error:
        pytest.skip(f"no control groups of version 1 can be made here: {error}")
    try:
        (box / "cpu.cfs_quota_us").write_text("150000")
        command = [sys.executable, "-c", IN_GROUP, str(inner)]
        run = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
        assert run.stdout == "1\n"
    finally:
        inner.rmdir()
        box.rmdir()
