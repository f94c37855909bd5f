"""The audit: compiles every kernel for every target and checks its machine code against ``limits``."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import triton
from rich.console import Console
from rich.table import Table

from kvloom_gpu.compiling import TARGETS, compiled
from kvloom_gpu.launches import Work, triton_everywhere
from kvloom_gpu.limits import LIMITS, NO_LIMITS, SHARED_LIMIT, DeviceLimits
from kvloom_gpu.machine_code import MachineCode, read


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel on one target.

    Attributes:
        kernel: its name.
        target: one of ``TARGETS``.
        shape: the model and the step of its first launch.
        code: its machine code; None if it did not compile.
        faults: the limits that it exceeds, as text; empty if it keeps all.
    """

    kernel: str
    target: str
    shape: str
    code: MachineCode | None
    faults: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether the kernel keeps its limits."""
        return not self.faults

    def values(self) -> dict[str, Any]:
        """The row as a dict."""
        code = self.code
        figures = (
            {}
            if code is None
            else {
                "regs": code.regs,
                "spills": code.spills,
                "stack": code.stack,
                "shared": code.shared,
                "loads_128": code.loads_128,
                "wide_share": round(code.wide_share, 3),
                "mma": code.mma,
                "loop": code.loop,
                "issue_util": None if code.issue_util is None else round(code.issue_util, 3),
            }
        )
        return {
            "kernel": self.kernel,
            "target": self.target,
            "shape": self.shape,
            **figures,
            "ok": self.ok,
            "faults": self.faults,
        }


def audit(
    works: Iterable[Work], targets: Iterable[str] = TARGETS, limits: dict[str, DeviceLimits] = LIMITS
) -> list[Row]:
    """Compile and check the kernels of these works. A kernel of several works appears once per target."""
    rows: list[Row] = []
    seen: set[tuple[str, str]] = set()
    with triton_everywhere():
        for work in works:
            for target in targets:
                try:
                    kernels = compiled(TARGETS[target], work.launch)
                except Exception as error:  # noqa: BLE001 a kernel that does not compile is a finding
                    rows.append(Row("?", target, work.shape, None, [f"does not compile: {error}"[:500]]))
                    continue
                for name, kernel in kernels:
                    if (target, kernel.hash) not in seen:
                        seen.add((target, kernel.hash))
                        code = read(kernel)
                        rows.append(
                            Row(name, target, work.shape, code, faults(code, target, limits.get(name, NO_LIMITS)))
                        )
    return rows


def faults(code: MachineCode, target: str, limits: DeviceLimits) -> list[str]:
    """The limits that a kernel's machine code exceeds, as text."""
    found = []
    if code.spills or code.stack:
        found.append(f"spills: {code.spills} instructions, a stack of {code.stack} bytes")
    if code.shared > SHARED_LIMIT[target]:
        found.append(f"shared memory: {code.shared} bytes of {SHARED_LIMIT[target]}")
    # On AMD only compilation, spills and memory are checked, because direct-to-LDS and buffer loads count differently
    if target.startswith("gfx"):
        return found
    if limits.wide is not None and code.wide_share < limits.wide:
        found.append(f"loads: {code.wide_share:.0%} of the main loop's bytes are 128 bits wide")
    if limits.issue_util is not None and not (code.issue_util or 9.99) <= limits.issue_util:
        found.append(f"issue slots: {code.issue_util or 9.99:.0%} of them, {limits.issue_util:.0%} are allowed")
    if limits.mma is not None and code.mma not in limits.mma[target]:
        found.append(f"matrix instruction: {code.mma}, not {' or '.join(limits.mma[target])}")
    return found


def meta() -> dict[str, Any]:
    """The versions that the figures were measured with."""
    return {"triton": triton.__version__, "targets": list(TARGETS)}


def print_table(rows: list[Row], console: Console) -> None:
    """Print the rows as a table, with failed ones last."""
    table = Table(title="kernel audit")
    table.add_column("kernel", no_wrap=True)
    table.add_column("target")
    table.add_column("first launched for", no_wrap=True)
    for name in ("regs", "spills", "shared", "128-bit loads", "wide", "mma", "issue", "ok"):
        table.add_column(name, justify="right")
    for row in sorted(rows, key=lambda row: not row.ok):
        code = row.code
        if code is None:
            table.add_row(row.kernel, row.target, row.shape, *["-"] * 7, "no")
            continue
        issue = code.issue_util
        table.add_row(
            row.kernel,
            row.target,
            row.shape,
            str(code.regs),
            str(code.spills),
            f"{code.shared:,}",
            str(code.loads_128),
            f"{code.wide_share:.0%}",
            code.mma or "-",
            "-" if issue is None else f"{issue:.0%}",
            "yes" if row.ok else "NO",
        )
    console.print(table)
    for row in rows:
        for fault in row.faults:
            console.print(f"{row.kernel} on {row.target} ({row.shape}): {fault}", highlight=False)
