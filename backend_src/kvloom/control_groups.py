"""Finds the control groups whose limits apply to this process, such as a container's or a service's."""

import re
from collections.abc import Iterator
from pathlib import Path

V1, V2 = 1, 2


def own_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[int, Path]]:
    """This process's group and the groups around it, in both versions of control groups. The limits of all apply.

    Args:
        controller: such as ``cpu`` or ``memory``.
        root: the folder that holds ``proc`` and the mount points.

    Yields:
        The version, ``V1`` or ``V2``, and the folder. It may be missing or without the controller's files.
    """
    membership = root / "proc/self/cgroup"
    mounts = root / "proc/self/mountinfo"
    if not (membership.is_file() and mounts.is_file()):
        return
    for line in membership.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        for mount_root, mount_point in _mounted(mounts.read_text(), controller if controllers else None):
            base = root / mount_point.lstrip("/")
            # In a container the path may be the host's. Then the container's own group is the root of the mount
            inner = path.removeprefix(mount_root) if path.startswith(mount_root) else path
            folder = base.joinpath(*(part for part in Path(inner).parts if part not in ("/", "..")))
            version = V1 if controllers else V2
            for group in (folder, *folder.parents):
                yield version, group
                if group == base:
                    break


def _mounted(mountinfo: str, controller: str | None) -> Iterator[tuple[str, str]]:
    """The mounts of a controller's hierarchy of version 1, or with None of version 2: what is mounted, and where."""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind == "cgroup2" if controller is None else kind == "cgroup" and controller in options.split(","):
            mount_root, mount_point = before.split(" ")[3:5]
            yield _plain(mount_root), _plain(mount_point)


def _plain(path: str) -> str:
    """A path from mountinfo, which has blanks and backslashes in octal."""
    return re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), path)
