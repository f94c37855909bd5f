"""How much memory the cache takes, and how many blocks that is."""

import re

import psutil

from kvloom.errors import SettingsError

AUTO_SHARE = 0.25
"""Share of the free memory that an automatic pool takes at most: weights and activations need room too."""

_UNITS = {"B": 1} | {
    prefix + unit: base ** (power + 1)
    for unit, base in (("B", 1000), ("iB", 1024))
    for power, prefix in enumerate("KMGT")
}


def memory_bytes(text: str, free: int) -> int:
    """Bytes that a kv_memory setting stands for.

    Args:
        text: "512MiB", "1.5GB", "60%" (of ``free``) or "auto".
        free: free memory of the device in bytes.
    """
    if text == "0":
        return 0
    if text == "auto":
        return int(free * AUTO_SHARE)
    match = re.fullmatch(r"([\d.]+)\s*(\S+)", text)
    assert match, "Settings checks the form"
    number, unit = float(match[1]), match[2]
    return int(number / 100 * free if unit == "%" else number * _UNITS[unit])


def pool_blocks(kv_memory: str, block_bytes: int, most: int) -> int:
    """Number of blocks in a pool of ``kv_memory``.

    Args:
        kv_memory: the setting.
        block_bytes: size of a block.
        most: blocks that can ever be in use at once; an automatic pool takes no more.

    Raises:
        SettingsError: not one block fits, or there is not that much free memory.
    """
    free = psutil.virtual_memory().available
    size = memory_bytes(kv_memory, free)
    if size > free:
        raise SettingsError(f"setting kv_memory={kv_memory!r}: only {free // 2**20} MiB are free")
    blocks = size // block_bytes
    if blocks < 1:
        raise SettingsError(f"setting kv_memory={kv_memory!r}: one block takes {block_bytes} bytes")
    return min(blocks, most) if kv_memory == "auto" else blocks
