"""A secret that the models of one tritonserver share, and that its clients don't know."""

import hashlib
from pathlib import Path

from kvloom.errors import LaunchError

PROC = Path("/proc")


def server_secret(server: int) -> str:
    """The secret by which the models of a tritonserver recognize each other's requests.

    Triton gives its models nothing in common that clients can't read. So the secret is a hash of random values from
    the kernel: the addresses of the server's process, which only its own user may read (see ``getauxval(3)`` and
    ``proc_pid_auxv(5)``), and the boot id, which can't be read over a network.

    Args:
        server: process id of the tritonserver.

    Raises:
        LaunchError: the kernel does not show these values.
    """
    try:
        addresses = (PROC / str(server) / "auxv").read_bytes()
        started = (PROC / str(server) / "stat").read_text().rpartition(")")[2].split()[19]
        boot = (PROC / "sys/kernel/random/boot_id").read_text()
    except OSError as error:
        raise LaunchError(
            f"can't read {error.filename}: {error.strerror}; the models need it to recognize each other's requests"
        ) from error
    return hashlib.sha256(b"\0".join([addresses, started.encode(), boot.encode()])).hexdigest()
