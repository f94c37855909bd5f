"""Protects the shared memory through which Triton and a model's process exchange prompts, answers and parameters."""

import os
from pathlib import Path

FOLDER = "/dev/shm/"


def close_to_others(maps: Path = Path("/proc/self/maps")) -> None:
    """Let only this process's user read the shared memory that it uses. Triton makes it readable for all users.

    Args:
        maps: the list of the process's memory mappings, see ``proc_pid_maps(5)``.
    """
    lines = maps.read_text("utf-8", "surrogateescape").splitlines()
    regions = {line.split(maxsplit=5)[-1] for line in lines if FOLDER in line}
    for region in regions:
        if region.startswith(FOLDER) and os.path.exists(region) and os.stat(region).st_uid == os.geteuid():
            os.chmod(region, 0o600)
