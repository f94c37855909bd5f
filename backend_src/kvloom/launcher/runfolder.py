"""Where the launcher keeps what a server needs while it runs."""

import logging
import re
import tempfile
from pathlib import Path

from kvloom.errors import LaunchError
from kvloom.private import check_place

log = logging.getLogger(__name__)

PLAIN = re.compile(r"[A-Za-z0-9._/+-]*")
"""Names that a shell takes as they are."""

FALLBACK = Path("/tmp").resolve()


def run_folder() -> "tempfile.TemporaryDirectory[str]":
    """Make a folder that only this user may enter, and that is removed in the end.

    Triton's Python backend starts its processes through a shell and does not quote the model's path: a blank in it
    hangs the start, and what stands between backquotes is executed. So the folder lies below TMPDIR only where that is
    a plain name, and where nobody else can put another folder in its place.

    Raises:
        LaunchError: there is no such place.
    """
    place = Path(tempfile.gettempdir()).resolve()
    if not PLAIN.fullmatch(str(place)):
        log.warning("TMPDIR=%s has characters that Triton can't take; using %s", ascii(str(place)), FALLBACK)
        place = FALLBACK
    try:
        check_place(place)
    except OSError as error:
        raise LaunchError(f"the folder for temporary files: {error}; name another one in TMPDIR") from error
    return tempfile.TemporaryDirectory(prefix="kvloom-", dir=place)
