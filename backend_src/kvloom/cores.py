"""How many cores this process may use, by its CPU affinity and its CPU quota."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from kvloom.control_groups import V1, own_groups


@dataclass(frozen=True, slots=True)
class Cores:
    """How many cores may be used, and why not more, in words."""

    count: int
    why: str


def usable_cores(root: Path = Path("/")) -> Cores:
    """The cores that this process may run on, or fewer if a control group's CPU quota allows fewer.

    A quota of 1.5 CPUs counts as one core; so does one below 1. With more threads than the quota allows, the kernel
    stops all threads for a part of every period, including those that receive requests and send answers, and a step
    waits at every operation for the threads that were stopped in it.

    Args:
        root: the folder that holds ``proc`` and the mount points of control groups.
    """
    allowed = len(os.sched_getaffinity(0))
    quota, group = min(_quotas(root), default=(float("inf"), root))
    if quota >= allowed:
        return Cores(allowed, f"this process may run on {allowed} core{'s' if allowed > 1 else ''}")
    return Cores(max(1, int(quota)), f"the CPU quota of {group} is {quota:.4g} CPUs")


def _quotas(root: Path) -> Iterator[tuple[float, Path]]:
    """The quotas in CPUs that apply to this process, each with its control group."""
    for version, group in own_groups("cpu", root):
        limit = _limit_v1(group) if version == V1 else _limit_v2(group)
        if limit is not None:
            quota_us, period_us = limit
            yield quota_us / period_us, group


def _limit_v1(group: Path) -> tuple[int, int] | None:
    quota, period = group / "cpu.cfs_quota_us", group / "cpu.cfs_period_us"
    if not (quota.is_file() and period.is_file()):
        return None
    quota_us = int(quota.read_text())
    return (quota_us, int(period.read_text())) if quota_us > 0 else None


def _limit_v2(group: Path) -> tuple[int, int] | None:
    limit = group / "cpu.max"
    # The root group has no limit
    if not limit.is_file():
        return None
    quota_us, period_us = limit.read_text().split()
    return (int(quota_us), int(period_us)) if quota_us != "max" else None
