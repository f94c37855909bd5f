"""Makes and checks folders and files that no other user can write to."""

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter. An existing folder is closed to all other users.

    Returns:
        The folder's path without links.

    Raises:
        OSError: it can't be made, or other users may write to it or replace it.
    """
    path = _made(path)
    path.chmod(0o700)
    return path


def trusted_folder(path: Path) -> Path:
    """Make a folder for files that are loaded or run later. Only this user and root may write to it.

    Returns:
        The folder's path without links.

    Raises:
        OSError: it can't be made, or other users may write to it or replace it.
    """
    path = _made(path)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
    return path


def check_own_file(path: Path) -> None:
    """Check that only this user or root can have written a file. A missing file is accepted.

    Raises:
        OSError: another user may have written it.
    """
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if found.st_uid not in (0, os.geteuid()) or not stat.S_ISREG(found.st_mode) or found.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{path} may be the work of another user: remove it")


def check_place(path: Path) -> None:
    """Check that no other user can replace this folder or one of its parents.

    Raises:
        OSError: another user can. The message names the folder.
    """
    for folder in (path, *path.parents):
        found = folder.stat(follow_symlinks=False)
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to user {found.st_uid}, who could change what is in it")
        # Debian and others give each user a private group with write access, so the user's own group is accepted
        strangers = stat.S_IWOTH if found.st_gid in (0, os.getegid()) else OTHERS_WRITE
        if found.st_mode & strangers and not found.st_mode & stat.S_ISVTX:
            raise PermissionError(f"other users may write to {folder}, and change what is in it")


def _made(path: Path) -> Path:
    path = path.absolute()
    missing = [folder for folder in (path, *path.parents) if not folder.exists()]
    for folder in reversed(missing):
        folder.mkdir(mode=0o700, exist_ok=True)
    path = path.resolve()
    check_place(path.parent)
    found = path.stat(follow_symlinks=False)
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(f"{path} is not a folder")
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {found.st_uid}, who could change what is in it")
    if found.st_uid != os.geteuid() and found.st_mode & OTHERS_WRITE:
        raise PermissionError(f"other users may write to {path}, and change what is in it")
    return path
