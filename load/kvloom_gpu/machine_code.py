"""Analyzes the speed of a compiled kernel's machine code, for NVIDIA and AMD."""

import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import triton

_TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"

BYTES_PER_CLOCK = 4.3e12 / 132 / 1.755e9
"""Bytes per clock that each of an H200's 132 multiprocessors reads from memory: 4.3 TB/s of a copy, at 1.755 GHz."""

_SCHEDULERS = 4
"""Instructions that a multiprocessor issues per clock."""

_MMA = {"UTC": r"UTC\w*MMA", "HGMMA": r"HGMMA", "HMMA": r"HMMA", "IMMA": r"IMMA", "MFMA": r"v_mfma\w*"}
"""Matrix instructions, the strongest first: Blackwell's, Hopper's, the older ones of fp16/bf16 and of int8; AMD's."""

_LOAD = re.compile(r"(LDGSTS|LDG|UTMALDG|UBLKCP)\b(\S*)")
_AMD_LOAD = re.compile(r"(?:global|buffer|flat)_load_(?:lds_)?(\w+)")
_AMD_BITS = {"dwordx4": 128, "dwordx3": 96, "dwordx2": 64, "dword": 32}


@dataclass(frozen=True, slots=True)
class MachineCode:
    """Figures of a kernel's machine code.

    Attributes:
        regs: registers of a thread.
        spills: instructions that spill registers to memory or read them back.
        stack: bytes of a thread's stack in memory.
        shared: bytes of shared memory.
        loads: number of loads from global memory by width in bits, in the main loop, or in the whole kernel if it has
            no loop. TMA counts as 128.
        mma: the matrix instruction in use, or None.
        loop: instructions of the main loop; 0 if there is no loop or they are not counted (AMD).
    """

    regs: int
    spills: int
    stack: int
    shared: int
    loads: Counter[int] = field(repr=False)
    mma: str | None
    loop: int

    @property
    def loads_128(self) -> int:
        """The number of loads with the maximum width."""
        return self.loads[128]

    @property
    def wide_share(self) -> float:
        """Share of the loaded bytes that come from loads of 128 bits."""
        everything = sum(bits * count for bits, count in self.loads.items())
        return 128 * self.loads_128 / everything if everything else 0.0

    @property
    def issue_util(self) -> float | None:
        """Share of an H200's issue slots that the main loop uses at the bandwidth of a copy.

        A thread issues ``loop`` instructions for ``loads_128`` times 16 bytes; above about 0.7 a kernel does not reach
        the bandwidth. None if there is no such loop.
        """
        if not self.loop or not self.loads_128:
            return None
        bytes_per_warp = self.loads_128 * 16 * 32
        return self.loop * BYTES_PER_CLOCK / (_SCHEDULERS * bytes_per_warp)


def read(kernel: Any) -> MachineCode:
    """The figures of a triton ``CompiledKernel``."""
    shared = kernel.metadata.shared
    return _nvidia(kernel.asm["cubin"], shared) if "cubin" in kernel.asm else _amd(kernel.asm["amdgcn"], shared)


def _nvidia(cubin: bytes, shared: int) -> MachineCode:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        resources = _run("cuobjdump", "--dump-resource-usage", file.name)
        text = _run("nvdisasm", file.name)
    found = dict(re.findall(r"\b(REG|STACK|LOCAL):(\d+)", resources))
    code, labels = _parse(text, r"(\.L\w+):", r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
    loop = _main_loop(code, labels, r"\bBRA\S*\s+(?:\S+,\s*)?`\((\.L\w+)\)", _nvidia_bits)
    return MachineCode(
        regs=int(found["REG"]),
        spills=sum(bool(re.match(r"(@!?U?P\w+\s+)?(STL|LDL)\b", line)) for line in code),
        stack=int(found["STACK"]) + int(found["LOCAL"]),
        shared=shared,
        loads=_loads(loop or code, _nvidia_bits),
        mma=_mma(code),
        loop=len(loop),
    )


def _amd(text: str, shared: int) -> MachineCode:
    found = {name: int(value) for name, value in re.findall(r"^\s+\.(\w+):\s+(\d+)$", text, re.MULTILINE)}
    code, labels = _parse(text, r"(\.LBB\w+):", r"((?:[svd]|ds|global|buffer|flat|scratch)_\w+.*)")
    loop = _main_loop(code, labels, r"s_cbranch_\w+\s+(\.LBB\w+)", _amd_bits)
    return MachineCode(
        regs=found["vgpr_count"] + found.get("agpr_count", 0),
        spills=found["vgpr_spill_count"] + found["sgpr_spill_count"],
        stack=found["private_segment_fixed_size"],
        shared=shared,
        loads=_loads(loop or code, _amd_bits),
        mma=_mma(code),
        loop=0,
    )


def _run(tool: str, *arguments: str) -> str:
    return subprocess.run([_TOOLS / tool, *arguments], capture_output=True, text=True, check=True).stdout


def _parse(text: str, label: str, instruction: str) -> tuple[list[str], dict[str, int]]:
    """The instructions in order, and the position of each label."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        stripped = line.strip()
        if match := re.match(label, stripped):
            labels[match[1]] = len(code)
        elif match := re.match(instruction, stripped):
            code.append(match[1].strip())
    return code, labels


def _main_loop(code: list[str], labels: dict[str, int], branch: str, bits: Any) -> list[str]:
    """The loop that loads most, the innermost of nested ones. Empty if there is no loop."""
    loops = []
    for end, line in enumerate(code):
        match = re.search(branch, line)
        start = labels.get(match[1], end) if match else end
        if start < end:
            loops.append(code[start : end + 1])
    return max(loops, key=lambda body: (_loads(body, bits)[128], -len(body)), default=[])


def _loads(code: list[str], bits: Any) -> Counter[int]:
    widths: Counter[int] = Counter()
    for line in code:
        width = bits(line)
        if width:
            widths[width] += 1
    return widths


def _nvidia_bits(line: str) -> int:
    match = _LOAD.search(line)
    if match is None:
        return 0
    if match[1].startswith("U"):
        return 128
    width = re.search(r"\.(128|64|[US]?16|[US]?8)\b", match[2])
    return int(width[1].strip("US")) if width else 32


def _amd_bits(line: str) -> int:
    match = _AMD_LOAD.match(line)
    if match is None:
        return 0
    return _AMD_BITS.get(match[1], 8 if "byte" in match[1] else 16)


def _mma(code: list[str]) -> str | None:
    return next((name for name, form in _MMA.items() if any(re.search(rf"\b{form}", line) for line in code)), None)
