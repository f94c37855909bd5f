"""What each kernel's machine code must keep to: one table, read from top to bottom."""

from dataclasses import dataclass

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may take."""


@dataclass(frozen=True, slots=True)
class DeviceLimits:
    """What is asked of a kernel beside no spills and shared memory within the target's limit.

    Attributes:
        wide: least share of the bytes that its main loop loads by 128 bits at a time; None: not limited.
        issue_util: the largest share of issue slots at that speed, on NVIDIA targets; None: not limited.
        mma: by target, the matrix instructions that are good enough.
    """

    wide: float | None = None
    issue_util: float | None = None
    mma: dict[str, tuple[str, ...]] | None = None


_ANY_MMA = {"sm_80": ("HMMA",), "sm_90": ("HMMA", "HGMMA"), "sm_100": ("HMMA", "UTC"), "gfx942": ("MFMA",)}
_HOPPER_MMA = {**_ANY_MMA, "sm_90": ("HGMMA",)}

LIMITS = {
    # keys and values; beside them the block table, four bytes for each row of a tile that a thread loads
    "_decode_split": DeviceLimits(wide=0.75, issue_util=0.30, mma=_ANY_MMA),
    "_prefill": DeviceLimits(wide=0.75, mma=_HOPPER_MMA),
    # weights; beside them their scales, in the worst case four bytes for each 16, and the rows they are multiplied with
    # 4 bits in groups of 32 with minima take the most instructions; 8 bits, and groups of 128, about half of the slots
    "quantized_product": DeviceLimits(wide=0.5, issue_util=0.95, mma=_ANY_MMA),
}
"""By the kernel's name; whoever is not listed has only the limits that hold for all."""

NO_LIMITS = DeviceLimits()
