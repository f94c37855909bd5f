"""Folders in which nobody else can lay or change anything."""

import os
import stat
from pathlib import Path

OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner may enter, or close the one that is there to everybody else.

    Returns:
        Its path without links.

    Raises:
        OSError: it can't be made, or others may lay something in it or in its place.
    """
    path = _made(path)
    path.chmod(0o700)
    return path


def trusted_folder(path: Path) -> Path:
    """Make a folder for what is loaded and run later, or see to it that only this user and root may write there.

    Returns:
        Its path without links.

    Raises:
        OSError: likewise.
    """
    path = _made(path)
    found = path.stat()
    if found.st_uid == os.geteuid() and found.st_mode & OTHERS_WRITE:
        path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS_WRITE)
    return path


def check_own_file(path: Path) -> None:
    """See to it that what a file holds is this user's or root's word. A file that is not there is fine.

    Raises:
        OSError: somebody else may have written it.
    """
    try:
        found = path.stat(follow_symlinks=False)
    except FileNotFoundError:
        return
    if found.st_uid not in (0, os.geteuid()) or not stat.S_ISREG(found.st_mode) or found.st_mode & OTHERS_WRITE:
        raise PermissionError(f"{path} may be the work of another user: remove it")


def check_place(path: Path) -> None:
    """See to it that nobody else can put another folder in this one's place, by a name on the way to it.

    Raises:
        OSError: somebody can; says where.
    """
    for folder in (path, *path.parents):
        found = folder.stat(follow_symlinks=False)
        if found.st_uid not in (0, os.geteuid()):
            raise PermissionError(f"{folder} belongs to user {found.st_uid}, who could change what is in it")
        # private groups: Debian and others give each user one, and let it write
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
        raise NotADirectoryError(f"{path} is no folder")
    if found.st_uid not in (0, os.geteuid()):
        raise PermissionError(f"{path} belongs to user {found.st_uid}, who could change what is in it")
    if found.st_uid != os.geteuid() and found.st_mode & OTHERS_WRITE:
        raise PermissionError(f"other users may write to {path}, and change what is in it")
    return path
