"""The C++ ops for CPUs. The machine's compiler builds them once, and a cache folder keeps the library."""

import ctypes
import hashlib
import logging
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-Wno-psabi")

_FLOATS = (torch.float32, torch.bfloat16)

_P, _B, _N, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_ARGUMENTS = {
    "kvloom_rows": (_P, _B, _P, _N, _N, _P),
    "kvloom_add_rms_norm": (_P, _P, _B, _P, _B, _F, _P, _N, _N, _P, _P),
    "kvloom_silu_mul": (_P, _B, _N, _N, _P),
    "kvloom_rope_kv_write": (_P, _B, _P, _P, _P, _P, _P, _B, _N, _N, _N, _N, _N, _N, _P),
    "kvloom_paged_attention": (_P, _B, _P, _P, _B, _P, _N, _P, _P, _N, _N, _N, _N, _N, _N, _F, _P),
    "kvloom_linear": (_P, _B, _N, _N, _P, _N, _P, _B),
    "kvloom_linear_gated": (_P, _B, _N, _N, _P, _N, _P),
    "kvloom_linear_pack": (_P, _B, _N, _N, _N, _B, _P),
    "kvloom_linear_rows": (_P, _B, _P, _N, _N, _N, _P),
    "kvloom_groups": (_B, _P, _B, _N, _N, _P, _N, _P, _B),
    "kvloom_groups_pack": (_B, _P, _P, _P, _N, _N, _P),
    "kvloom_groups_rows": (_B, _P, _P, _N, _N, _N, _P),
    "kvloom_int8": (_N, _P, _B, _N, _N, _N, _P, _N, _P, _B),
    "kvloom_int8_gated": (_N, _P, _B, _N, _N, _N, _P, _N, _P),
    "kvloom_int8_pack": (_N, _P, _P, _N, _N, _B, _P),
    "kvloom_int8_rows": (_N, _P, _P, _N, _N, _N, _P),
    "kvloom_likeliest": (_P, _N, _N, _P, _P),
    "kvloom_sample": (_P, _N, _N, _N, _P, _P, _P, _P, _P, _P),
    "kvloom_edit": (_P, _P, _P, _P, _P, _P, _N, _P),
    "kvloom_restore": (_P, _P, _P, _N),
    "kvloom_logprobs": (_P, _N, _N, _P, _N, _P, _P, _P),
    "kvloom_replay": (_P,),
}
"""The functions' argument types. With them a call accepts plain numbers and takes half the time."""

Argument = int | float | None
"""An argument of a function: an address (None is null), a number or a flag."""


class Recorder(Protocol):
    """Records the calls of a thread's ops and allocates their results; see recording.py."""

    def note(self, lib: "Library", function: str, types: tuple[type, ...], arguments: tuple[Argument, ...]) -> None:
        """Record a call of a library's function, before it is made."""

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Allocate memory for a result."""


class _Thread(threading.local):
    recorder: Recorder | None = None


_thread = _Thread()


class Library:
    """A built library. Its functions are attributes."""

    def __init__(self, path: Path):
        """Load the library.

        Raises:
            OSError: it can't be loaded, or another user may have written it.
        """
        found = path.stat()
        if found.st_uid not in (0, os.geteuid()) or found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise PermissionError(f"{path} may be the work of another user: remove it")
        self._functions = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Callable[..., int]:
        """Look up a function and keep it as an attribute.

        Raises:
            AttributeError: there is no function of this name.
        """
        function, types = getattr(self._functions, name), _ARGUMENTS.get(name, ())
        function.argtypes = types

        def call(*arguments: Argument) -> int:
            if _thread.recorder is not None:
                _thread.recorder.note(self, name, types, arguments)
            result: int = function(*arguments)
            return result

        setattr(self, name, call)
        return call

    def address(self, name: str) -> int | None:
        """The address of a function; None if there is no function of this name."""
        function = getattr(self._functions, name, None)
        return None if function is None else ctypes.cast(function, ctypes.c_void_p).value


_library: Library | None = None
_failed = False


class _NotUsable(Exception):
    """There is no usable library. ``str()`` says why and what to do."""


def use_native(cache: Path, machine: str = "native", building: Callable[[str], None] = log.warning) -> bool:
    """Let the ops use the C++ library. Build it first if ``cache`` does not have it.

    The library runs on torch's OpenMP threads. If there is no usable library, the ops run in plain torch, and the log
    says so.

    Args:
        cache: folder for built libraries, one per compiler, flags, instruction set and source. It must be writable only
            if a library is missing.
        machine: the instructions that may be used, as a value of the compiler's -march.
        building: called with progress messages while a library is built.

    Returns:
        Whether the ops use C++.
    """
    global _library, _failed
    try:
        _library, _failed = _find_or_build(cache, machine, building), False
    except _NotUsable as error:
        use_torch(str(error))
    except OSError as error:
        use_torch(f"{error}; set XDG_CACHE_HOME to a folder that can be written to")
    return _library is not None


def use_torch(reason: str) -> None:
    """Let the ops run in plain torch, and log the reason."""
    global _library, _failed
    _library, _failed = None, True
    log.warning("the CPU ops run in plain torch, several times slower: %s", reason)


def _find_or_build(cache: Path, machine: str, building: Callable[[str], None]) -> Library:
    compiler = find_compiler()
    if compiler is None:
        raise _NotUsable("no C++ compiler found; install g++")
    path = cache / f"{_identity(compiler, machine)}.so"
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            building(f"building the CPU ops with {compiler}, once; takes about half a minute")
            built = Path(folder) / "ops.so"
            try:
                _build(compiler, machine, built, building)
            except subprocess.CalledProcessError as error:
                raise _NotUsable(f"could not build the CPU ops: {error}\n{error.stderr[-2000:]}") from error
            os.replace(built, path)
    try:
        return Library(path)
    except OSError as error:
        raise _NotUsable(f"could not load {path}: {error}; remove it to have it built again") from error


def _build(compiler: str, machine: str, built: Path, building: Callable[[str], None]) -> None:
    """Compile the sources in parallel and link them.

    Raises:
        CalledProcessError: the compiler failed.
    """

    def run(*arguments: str) -> None:
        _run(compiler, *FLAGS, f"-march={machine}", *arguments)

    def compile_one(source: Path) -> str:
        part = str(built.with_name(f"{source.stem}.o"))
        run("-c", str(source), "-o", part)
        return part

    # The largest source first, so that it does not finish last. Few at once, since each takes half a gigabyte
    sources = sorted(SOURCES.glob("*.cpp"), key=lambda path: path.stat().st_size, reverse=True)
    with ThreadPoolExecutor(min(4, len(os.sched_getaffinity(0)))) as pool:
        parts = []
        for part in pool.map(compile_one, sources):
            parts.append(part)
            building(f"building the CPU ops: {len(parts)} of {len(sources)} files")
    run("-shared", *parts, "-o", str(built))
    built.chmod(0o755)  # whatever the umask is: a library that others may write is not loaded


def find_compiler() -> str | None:
    """Path of the machine's C++ compiler."""
    return shutil.which("g++") or shutil.which("c++")


def is_buildable() -> bool:
    """Whether the ops use C++ or would after ``use_native``: there is a compiler, and it has not failed."""
    return find_compiler() is not None and not _failed


def stop_using_native() -> None:
    """Let the ops run in plain torch again. Only tests need this."""
    global _library, _failed
    _library, _failed = None, False


def library(*tensors: torch.Tensor) -> Library | None:
    """The library if it supports these tensors, which must be on the CPU and fp32 or bf16; else None."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype not in _FLOATS:
            return None
    return _library


def empty(*shape: int, dtype: torch.dtype, device: torch.device | None = None) -> torch.Tensor:
    """Allocate uninitialized memory for an op's result."""
    if _thread.recorder is not None:
        assert device is None or device.type == "cpu"
        return _thread.recorder.empty(shape, dtype)
    return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def recorded_by(recorder: Recorder) -> Iterator[None]:
    """Let a recorder record the ops of this thread."""
    assert _thread.recorder is None
    _thread.recorder = recorder
    try:
        yield
    finally:
        _thread.recorder = None


def _identity(compiler: str, machine: str) -> str:
    """A hash of everything that the library depends on.

    Raises:
        _NotUsable: the compiler does not work or is not GCC.
    """
    try:
        version = _run(compiler, "--version")
        # Only GCC has these options. Another compiler's library would bring a second OpenMP beside torch's
        instructions = _run(compiler, f"-march={machine}", "-Q", "--help=target")
    except (OSError, subprocess.CalledProcessError) as error:
        raise _NotUsable(f"{compiler} is not GCC or does not work ({error}); install g++") from error
    parts = [version, instructions, " ".join(FLAGS)]
    parts += [path.read_text(encoding="utf-8") for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _run(*command: str) -> str:
    """Run a command and return its output.

    Raises:
        CalledProcessError: it failed.
    """
    return subprocess.run(command, capture_output=True, encoding="utf-8", errors="replace", check=True).stdout
