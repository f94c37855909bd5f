"""The limits of each kernel's machine code: one table, read from top to bottom."""

from dataclasses import dataclass

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may use."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """The limits of a kernel, in addition to no spills and the target's limit of shared memory.

    Attributes:
        wide: minimum share of the main loop's bytes that are loaded 128 bits at a time; None for no limit.
        issue_util: maximum of ``MachineCode.issue_util``, on NVIDIA targets; None for no limit.
        mma: the allowed matrix instructions by target; None for no limit.
    """

    wide: float | None = None
    issue_util: float | None = None
    mma: dict[str, tuple[str, ...]] | None = None


_ANY_MMA = {"sm_80": ("HMMA",), "sm_90": ("HMMA", "HGMMA"), "sm_100": ("HMMA", "UTC"), "gfx942": ("MFMA",)}
_HOPPER_MMA = {**_ANY_MMA, "sm_90": ("HGMMA",)}

LIMITS = {
    # Keys and values, and the block table: four bytes for each row of a tile that a thread loads
    "_decode_split": DeviceLimits(wide=0.75, issue_util=0.30, mma=_ANY_MMA),
    "_prefill": DeviceLimits(wide=0.75, mma=_HOPPER_MMA),
    # Weights, their scales (at most four bytes for each 16), and the rows that they are multiplied with.
    # 4 bits in groups of 32 with minima take the most instructions; 8 bits, and groups of 128, about half of the slots
    "quantized_product": DeviceLimits(wide=0.5, issue_util=0.95, mma=_ANY_MMA),
}
"""The limits by the kernel's name. A kernel that is not listed has only the common limits."""

NO_LIMITS = DeviceLimits()
