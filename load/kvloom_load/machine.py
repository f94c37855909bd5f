"""Describes the machine of a measurement in detail, because cloud machines call their CPU just "AMD EPYC"."""

import re
from pathlib import Path

from kvloom.cores import usable_cores

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")
"""The instruction sets for matrix products."""


def cpu(cpuinfo: Path = Path("/proc/cpuinfo"), caches: Path = Path("/sys/devices/system/cpu/cpu0/cache")) -> str:
    """The CPU's name, family and model, number of usable cores, vector instructions and cache sizes."""
    first = cpuinfo.read_text().split("\n\n")[0]
    fields: dict[str, str] = dict(re.findall(r"^(.+?)\s*:\s*(.*)$", first, re.MULTILINE))
    flags = fields.get("flags", fields.get("Features", "")).split()
    sizes = [
        f"L{_read(index / 'level')} {_read(index / 'size')}"
        for index in sorted(caches.glob("index*"))
        if _read(index / "type") != "Instruction"
    ]
    parts = [
        fields.get("model name", "unknown CPU"),
        f"family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else "",
        f"{usable_cores().count} cores",
        " ".join(flag for flag in FLAGS if flag in flags),
        *sizes,
    ]
    return ", ".join(part for part in parts if part)


def _read(file: Path) -> str:
    return file.read_text().strip()
