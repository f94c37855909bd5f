"""Folders in which nobody else can lay or change anything."""

import os
import stat
from pathlib import Path


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter, or close the one that is there to everybody else.

    Raises:
        OSError: it can't be made, is a link, or belongs to somebody else, who could have laid anything in it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        found = os.fstat(descriptor)
        if found.st_uid != os.geteuid():
            raise PermissionError(f"{path} belongs to user {found.st_uid}, not to this one; remove it")
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(descriptor, 0o700)
    finally:
        os.close(descriptor)
    return path


def trusted_folder(path: Path) -> Path:
    """Make a folder for what is loaded and run later, or check the one that is there.

    Raises:
        OSError: it can't be made, or others than this user and root may lay something in it.
    """
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()) or found.st_mode & stat.S_IWOTH:
        raise PermissionError(f"other users may write to {path}: remove it, or name another one in XDG_CACHE_HOME")
    return path
