"""Control groups as they lie below a folder in place of /."""

from pathlib import Path


def group(folder: Path, **files: object) -> Path:
    """Write a group's files; in their names two underscores stand for the dot."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(f"{text}\n")
    return folder


def lay_out(root: Path, controller: str, mount_root: str = "/") -> None:
    """Mount a controller of version 1, and version 2, where systems have them; a test writes proc/self/cgroup."""
    (root / "proc/self").mkdir(parents=True)
    v1, v2 = f"/sys/fs/cgroup/{controller}", "/sys/fs/cgroup"
    (root / "proc/self/mountinfo").write_text(
        "22 27 0:21 / /proc rw,relatime - proc proc rw\n"
        f"32 31 0:29 {mount_root} {v1} rw,nosuid master:9 - cgroup cgroup rw,{controller}\n"
        f"33 31 0:30 {mount_root} {v2} rw,nosuid shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
    )
