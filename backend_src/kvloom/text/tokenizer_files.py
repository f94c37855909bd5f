"""The files of a folder's tokenizer, as the libraries that read them can open them."""

import codecs
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_NAMES = ("config.json", "generation_config.json", "*token*", "vocab.json", "merges.txt", "chat_template.*")
"""What transformers may read of a folder to load its tokenizer."""


@contextmanager
def clean_copy(folder: Path) -> Iterator[Path]:
    """Yield a folder with copies of the tokenizer's files, without byte order marks.

    Some editors put such a mark in front of a file, and no JSON parser here accepts it. The copy's name is ASCII: the
    Rust library takes no name that the locale can't decode.

    Raises:
        OSError: a file can't be read or written.
    """
    with tempfile.TemporaryDirectory(prefix="kvloom-tokenizer-") as made:
        copies = Path(made)
        for file in sorted({file for name in _NAMES for file in folder.glob(name) if file.is_file()}):
            with file.open("rb") as given, (copies / file.name).open("wb") as copy:
                if given.read(len(codecs.BOM_UTF8)) != codecs.BOM_UTF8:
                    given.seek(0)
                shutil.copyfileobj(given, copy)
        yield copies
