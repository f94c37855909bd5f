"""The process in which Triton runs a model's Python."""

import io
import logging
import sys

from kvloom.serving.shared_memory import close_to_others


def prepare() -> None:
    """Set up the log, and close Triton's shared memory to other users."""
    if isinstance(sys.stderr, io.TextIOWrapper):
        # Triton starts Python in an ASCII locale; the log is UTF-8, and names of files are written as they are
        sys.stderr.reconfigure(encoding="utf-8", errors="surrogateescape")
    logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
    close_to_others()
