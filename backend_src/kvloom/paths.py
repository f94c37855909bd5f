"""Paths in a process whose locale may be ASCII, as it is for Python in Triton whatever the environment says."""

import os
from pathlib import Path

from kvloom.errors import ModelError


def path_of(text: str) -> Path:
    """The path that a setting names. Settings are UTF-8; so are the names of files, whatever the locale."""
    return Path(os.fsdecode(text.encode("utf-8", "surrogateescape")))


def readable(text: str) -> str:
    """A message that may contain paths, as valid Unicode. In an ASCII locale Python has surrogates for other bytes."""
    return text.encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def not_permitted(error: PermissionError) -> ModelError:
    """The error for a model's file or folder that this process may not read."""
    return ModelError(f"{error.filename}: permission denied; let user {os.geteuid()}, who runs the server, read it")
