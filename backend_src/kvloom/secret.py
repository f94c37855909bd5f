"""What the models of one tritonserver know, and its clients don't."""

import hashlib
from pathlib import Path

from kvloom.errors import LaunchError

PROC = Path("/proc")


def server_secret(server: int) -> str:
    """The secret by which the models of a tritonserver know each other's requests.

    Triton gives its models nothing in common that clients can't read. So the secret is made of what the kernel has
    chosen at random: the addresses of the server's process, which only its own user may read (see ``getauxval(3)`` and
    ``proc_pid_auxv(5)``), and the id of this boot, which nobody learns over a network.

    Args:
        server: process id of the tritonserver.

    Raises:
        LaunchError: the kernel does not show them.
    """
    try:
        addresses = (PROC / str(server) / "auxv").read_bytes()
        started = (PROC / str(server) / "stat").read_text().rpartition(")")[2].split()[19]
        boot = (PROC / "sys/kernel/random/boot_id").read_text()
    except OSError as error:
        raise LaunchError(f"{error.filename}: {error.strerror}; the models need it to know each other") from error
    return hashlib.sha256(b"\0".join([addresses, started.encode(), boot.encode()])).hexdigest()
