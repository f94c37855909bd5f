"""Sizes as people write them, and the memory that a control group leaves."""

from pathlib import Path

import pytest

from kvloom.planning.memory import free_memory, size_bytes, size_text
from support.control_groups import group, lay_out

GIB = 2**30
MIB = 2**20


@pytest.mark.parametrize(
    "text, expected",
    [("0", 0), ("100B", 100), ("1KB", 1000), ("1KiB", 1024), ("1.5GB", 1_500_000_000), ("512 MiB", 536_870_912)],
)
def test_sizes(text, expected):
    assert size_bytes(text) == expected


@pytest.mark.parametrize(
    "size, text",
    [(0, "0 B"), (999, "999 B"), (1000, "1 KiB"), (1536, "1.5 KiB"), (720 * 1024, "720 KiB"), (3 * GIB, "3 GiB")],
)
def test_sizes_for_people(size, text):
    assert size_text(size) == text


def v2(folder: Path, limit: object, usage: int, cache: int = 0, high: object = "max") -> Path:
    stat = f"anon {usage - cache}\nfile {cache}\ninactive_file {cache // 2}\nactive_file {cache - cache // 2}"
    return group(folder, memory__max=limit, memory__high=high, memory__current=usage, memory__stat=stat)


def v1(folder: Path, limit: int, usage: int, cache: int = 0) -> Path:
    stat = f"cache {cache}\ninactive_file 1\ntotal_inactive_file {cache}\ntotal_active_file 0"
    return group(folder, memory__limit_in_bytes=limit, memory__usage_in_bytes=usage, memory__stat=stat)


@pytest.fixture
def room(tmp_path):
    """The folder for control groups, and the free memory of a process in one of them."""
    lay_out(tmp_path, "memory")

    def free(membership: str) -> int:
        (tmp_path / "proc/self/cgroup").write_text(membership)
        return free_memory(tmp_path)

    return tmp_path / "sys/fs/cgroup", free


def test_without_control_groups_the_machine_decides(tmp_path):
    import psutil

    free = free_memory(tmp_path / "none")
    assert abs(free - psutil.virtual_memory().available) < GIB
    assert free_memory() <= free + GIB


def test_a_limit_of_version_2_counts_and_its_page_cache_is_free(room):
    root, free = room
    v2(root / "pod" / "box", 64 * MIB, 40 * MIB, cache=10 * MIB)
    assert free("0::/pod/box\n") == 34 * MIB


def test_the_limit_of_an_outer_group_counts(room):
    root, free = room
    v2(root / "pod" / "box", "max", 8 * MIB)
    v2(root / "pod", 32 * MIB, 20 * MIB)
    assert free("0::/pod/box\n") == 12 * MIB


def test_memory_high_counts(room):
    root, free = room
    v2(root / "box", 64 * MIB, 10 * MIB, high=30 * MIB)
    assert free("0::/box\n") == 20 * MIB


@pytest.mark.parametrize("path", ["/", "/docker/0123abc", "/../../other"])
def test_inside_a_container_its_group_is_the_root(room, path):
    root, free = room
    v2(root, 64 * MIB, 60 * MIB, cache=MIB)
    assert free(f"0::{path}\n") == 5 * MIB


def test_a_limit_of_version_1_counts(room):
    root, free = room
    v1(root / "memory", 2**63 - 4096, 900 * MIB)
    v1(root / "memory" / "docker" / "box", 64 * MIB, 50 * MIB, cache=6 * MIB)
    assert free("5:cpu:/docker/box\n4:memory:/docker/box\n0::/\n") == 20 * MIB


def test_more_in_use_than_allowed_is_nothing_free(room):
    root, free = room
    v2(root, MIB, 2 * MIB)
    assert free("0::/\n") == 0
