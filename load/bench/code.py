"""Identifies the code that a benchmark measures."""

import hashlib
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
NO_CODE = (":!load/results", ":!*README.md")
"""Files that do not affect any figure."""


def code_version(root: Path = ROOT) -> str:
    """The git revision, with ``dirty`` and a digest if there are changes. Without git: the package's version."""
    revision = _git(root, "rev-parse", "HEAD")
    if revision is None:
        return f"kvloom {version('kvloom')}"
    changes = _git(root, "diff", "HEAD", "--", ".", *NO_CODE)
    return f"{revision} dirty {hashlib.sha256(changes.encode()).hexdigest()[:8]}" if changes else revision


def _git(root: Path, *words: str) -> str | None:
    """The output of a git command; None if there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(root), *words], capture_output=True, text=True, errors="replace")
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
