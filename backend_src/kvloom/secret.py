"""What the models of one tritonserver know, and its clients don't."""

import os
import secrets
import tempfile
from contextlib import suppress
from pathlib import Path

from kvloom.errors import LaunchError
from kvloom.private import private_folder

PROC = Path("/proc")


def server_secret(server: int) -> str:
    """The secret by which the models of a tritonserver know each other's requests.

    Triton gives its models nothing in common that clients can't read. So the model that asks first writes a file that
    only the server's user may read, as X servers do with their cookies.

    Args:
        server: process id of the tritonserver.

    Raises:
        LaunchError: the file can't be written or read.
    """
    try:
        return _shared(_name(server), private_folder(_folder()))
    except OSError as error:
        raise LaunchError(f"the folder for temporary files (TMPDIR): {error}") from error


def _shared(name: str, folder: Path) -> str:
    _remove_what_is_left(folder)
    path = folder / name
    fresh = folder / f"{name}.{os.getpid()}"
    fresh.touch(mode=0o600)
    fresh.write_text(secrets.token_urlsafe())
    # of several that come at once one is the first, and the file is complete from the beginning
    with suppress(FileExistsError):
        os.link(fresh, path)
    fresh.unlink()
    return path.read_text()


def forget_secret(server: int) -> None:
    """Remove the file of a tritonserver that has ended."""
    for path in _folder().glob(f"{server}-*"):
        path.unlink(missing_ok=True)


def _folder() -> Path:
    return Path(tempfile.gettempdir()) / f"kvloom-{os.geteuid()}"


def _name(process: int) -> str:
    """Names a process for good: its number may be given to another one later, which has started at another time."""
    after_name = (PROC / str(process) / "stat").read_text().rpartition(")")[2]
    return f"{process}-{after_name.split()[19]}"


def _remove_what_is_left(folder: Path) -> None:
    """Remove the files of servers that nobody could clean up after."""
    for path in folder.iterdir():
        process = path.name.partition("-")[0]
        if process.isdecimal() and not (PROC / process).exists():
            path.unlink(missing_ok=True)
