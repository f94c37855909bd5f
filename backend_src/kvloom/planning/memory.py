"""Measures the memory that this process can take, and parses and formats sizes."""

import ctypes
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

from kvloom.control_groups import V1, own_groups

_UNITS = {"B": 1} | {
    prefix + unit: base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}


def size_bytes(text: str) -> int:
    """Parse a size like "512MiB", "1.5GB", "100B" or "0" to bytes."""
    match = re.fullmatch(r"([\d.]+)\s*(\S*)", text)
    assert match, "Settings has not checked the form"
    return int(float(match[1]) * _UNITS[match[2] or "B"])


def size_text(size: float) -> str:
    """Format bytes for people: "720 KiB", "1.4 MiB"."""
    power = 0
    while size >= 1000 and power < 4:
        size, power = size / 1024, power + 1
    return f"{size:.1f}".removesuffix(".0") + (" B", " KiB", " MiB", " GiB", " TiB")[power]


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take: the machine's available memory, or less in a limited container.

    Args:
        root: the folder that holds ``proc`` and the mount points of control groups.
    """
    return min([psutil.virtual_memory().available, *_cgroup_rooms(root)])


@dataclass(frozen=True, slots=True)
class _Version:
    """File names of one version of cgroup's memory controller, and the lines of memory.stat that count page cache."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]


_V1 = _Version(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))
# Above memory.high the kernel kills nothing but slows all processes of the group down
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def _cgroup_rooms(root: Path) -> Iterator[int]:
    """Bytes left below every limit of this process: the limits of its control groups and their parents."""
    for version, group in own_groups("memory", root):
        yield from _rooms(group, _V1 if version == V1 else _V2)


def _rooms(group: Path, version: _Version) -> Iterator[int]:
    usage = group / version.usage
    for limit in (group / name for name in version.limits):
        # The root group has no limit
        if not (limit.is_file() and usage.is_file()):
            continue
        text = limit.read_text().strip()
        if text != "max":
            # Page cache counts as free, because the kernel drops it before an allocation fails
            yield max(0, int(text) - max(0, int(usage.read_text()) - _page_cache(group, version)))


def _page_cache(group: Path, version: _Version) -> int:
    stat = group / "memory.stat"
    if not stat.is_file():
        return 0
    lines = (line.split() for line in stat.read_text().splitlines())
    return sum(int(fields[1]) for fields in lines if len(fields) == 2 and fields[0] in version.cache)


def give_back_freed() -> None:
    """Return freed memory that glibc keeps to the system. Does nothing with other C libraries.

    Loading weights allocates and frees temporary tensors. 50 to 130 MiB of them would stay with the process.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
