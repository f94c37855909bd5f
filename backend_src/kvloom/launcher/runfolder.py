"""The temporary folder for a running server's files."""

import logging
import re
import tempfile
from pathlib import Path

from kvloom.errors import LaunchError
from kvloom.private import check_place

log = logging.getLogger(__name__)

PLAIN = re.compile(r"[A-Za-z0-9._/+-]*")
"""Names that a shell does not change."""

FALLBACK = Path("/tmp").resolve()


def run_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a temporary folder that only this user may enter.

    Triton's Python backend starts its processes through a shell and does not quote the model's path. A space in it
    hangs the start, and text in backquotes is executed. So TMPDIR is used only if its name is plain. No other user may
    be able to replace the folder.

    Raises:
        LaunchError: another user could replace the folder.
    """
    place = Path(tempfile.gettempdir()).resolve()
    if not PLAIN.fullmatch(str(place)):
        log.warning("TMPDIR=%s has characters that Triton does not support; using %s", ascii(str(place)), FALLBACK)
        place = FALLBACK
    try:
        check_place(place)
    except OSError as error:
        raise LaunchError(f"the folder for temporary files: {error}; set TMPDIR to another folder") from error
    return tempfile.TemporaryDirectory(prefix="kvloom-", dir=place)
