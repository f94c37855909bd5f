"""What each kernel's machine code must keep to: one table, read from top to bottom."""

from dataclasses import dataclass

SHARED_LIMIT = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx942": 64 * 1024}
"""Bytes of shared memory that one program may take."""

LEAST_WIDE = 0.75
"""Share of a main loop's bytes that must come by 128-bit loads where a kernel streams the cache; the rest is the block
table, four bytes for each row of a tile that a thread loads."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What is asked of a kernel beside no spills and shared memory within the target's limit.

    Attributes:
        streams: it reads keys, values or weights at the speed of memory: its main loop must load them 128 bits at a
            time.
        issue_util: the largest share of issue slots at that speed, on NVIDIA targets; None: not limited.
        mma: by target, the matrix instructions that are good enough.
    """

    streams: bool = False
    issue_util: float | None = None
    mma: dict[str, tuple[str, ...]] | None = None


_ANY_MMA = {"sm_80": ("HMMA",), "sm_90": ("HMMA", "HGMMA"), "sm_100": ("HMMA", "UTC"), "gfx942": ("MFMA",)}
_HOPPER_MMA = {**_ANY_MMA, "sm_90": ("HGMMA",)}

LIMITS = {
    # kernel                       reads the cache or weights   issue slots        matrix instructions
    "_decode_split": Limits(streams=True, issue_util=0.30, mma=_ANY_MMA),
    "_prefill": Limits(streams=True, mma=_HOPPER_MMA),
    "quantized_product": Limits(streams=True, mma=_ANY_MMA),
}
"""By the kernel's name; whoever is not listed has only the limits that hold for all."""

NO_LIMITS = Limits()
