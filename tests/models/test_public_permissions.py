"""Files that the server's user may not read (K04)."""

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from kvloom.errors import ModelError
from kvloom.launcher.repository import ModelRepository
from kvloom.models.weights import open_model
from kvloom.text.tokenizer import Tokenizer
from support.server import SETTINGS
from support.tiny_models import make_tiny, to_gguf

NOBODY = 65534


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user may enter, unlike pytest's."""
    made = Path(tempfile.mkdtemp(prefix="kvloom-test-"))
    made.chmod(0o755)
    yield made
    shutil.rmtree(made)


@contextmanager
def unreadable(path: Path) -> Iterator[int]:
    """Take all permissions from a path; root, who needs none, becomes another user meanwhile. Yields the user's id."""
    mode = path.stat().st_mode
    path.chmod(0)
    before = os.geteuid()
    if before == 0:
        os.seteuid(NOBODY)
    try:
        yield os.geteuid()
    finally:
        if before == 0:
            os.seteuid(before)
        path.chmod(mode)


@pytest.mark.parametrize(
    "name",
    ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", "generation_config.json", "."],
)
def test_k04_a_folder_that_may_not_be_read(place, name):
    folder = make_tiny(place / "model")
    with unreadable(folder / name) as user:
        expected = rf"{re.escape(str(folder))}.*: permission denied; let user {user}, who runs the server, read it"
        with pytest.raises(ModelError, match=expected):
            open_model(folder)
            Tokenizer.from_folder(folder)
    open_model(folder)
    Tokenizer.from_folder(folder)


def test_k04_a_file_that_may_not_be_read(place):
    file = to_gguf(make_tiny(place / "model"), place / "model.gguf")
    with unreadable(file), pytest.raises(ModelError, match=r"model\.gguf: permission denied; let user"):
        open_model(file)


def test_k04_a_model_behind_a_closed_folder(place):
    folder = make_tiny(place / "closed" / "model")
    with unreadable(place / "closed"), pytest.raises(ModelError, match="model: permission denied; let user"):
        ModelRepository(SETTINGS | {"model": str(folder)})
