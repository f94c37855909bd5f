"""The C++ ops for CPUs: built once by the machine's compiler, found again in a cache folder."""

import ctypes
import hashlib
import logging
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch

log = logging.getLogger(__name__)

SOURCES = Path(__file__).parent / "cpu"
FLAGS = ("-O3", "-std=c++17", "-fopenmp", "-fPIC", "-shared", "-Wno-psabi")

_FLOATS = (torch.float32, torch.bfloat16)

_P, _B, _N, _F = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64, ctypes.c_float

_ARGUMENTS = {
    "kvloom_add_rms_norm": (_P, _P, _B, _P, _B, _F, _N, _N, _P, _P),
    "kvloom_silu_mul": (_P, _B, _N, _N, _P),
    "kvloom_rope_kv_write": (_P, _B, _P, _P, _P, _P, _P, _B, _N, _N, _N, _N, _N, _N, _P),
    "kvloom_paged_attention": (_P, _B, _P, _P, _B, _P, _N, _P, _P, _N, _N, _N, _N, _N, _N, _F, _P),
    "kvloom_linear": (_P, _B, _N, _N, _P, _N, _P, _B),
    "kvloom_linear_pack": (_P, _B, _N, _N, _N, _P),
    "kvloom_linear_rows": (_P, _B, _P, _N, _N, _N, _P),
    "kvloom_groups": (_B, _P, _B, _N, _N, _P, _N, _P, _B),
    "kvloom_groups_pack": (_B, _P, _P, _P, _N, _N, _P),
    "kvloom_groups_rows": (_B, _P, _P, _N, _N, _N, _P),
    "kvloom_int8": (_P, _B, _N, _N, _N, _P, _N, _P, _B),
    "kvloom_int8_pack": (_P, _P, _N, _N, _P),
    "kvloom_int8_rows": (_P, _P, _N, _N, _N, _P),
    "kvloom_likeliest": (_P, _N, _N, _P, _P),
}
"""What the functions take; where it is declared, a call takes plain numbers, and half the time."""

_library: ctypes.CDLL | None = None


def use_native(cache: Path, machine: str = "native") -> bool:
    """Let the ops use the C++ library from now on, building it first where ``cache`` does not have it.

    The library runs on torch's own OpenMP threads. Without a compiler the ops go on in plain torch; the log says so.

    Args:
        cache: folder for built libraries; one per compiler, flags, instruction set and source.
        machine: whose instructions may be used, as the compiler's -march takes it.

    Returns:
        Whether the ops are in C++.
    """
    global _library
    compiler = find_compiler()
    if compiler is None:
        log.warning("no C++ compiler (g++) found: the CPU ops run in plain torch, several times slower")
        return False
    path = cache / f"{_identity(compiler, machine)}.so"
    if not path.exists():
        log.warning("building the CPU ops with %s, once; takes about 20 s", compiler)
        cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=cache) as folder:
            built = Path(folder) / "ops.so"
            command = [
                compiler,
                *FLAGS,
                f"-march={machine}",
                *map(str, sorted(SOURCES.glob("*.cpp"))),
                "-o",
                str(built),
            ]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                log.warning("building the CPU ops failed, they run in plain torch:\n%s", result.stderr[-2000:])
                return False
            os.replace(built, path)
    _library = ctypes.CDLL(str(path))
    for name, arguments in _ARGUMENTS.items():
        getattr(_library, name).argtypes = arguments
    return True


def find_compiler() -> str | None:
    """Path of the machine's C++ compiler."""
    return shutil.which("g++") or shutil.which("c++")


def stop_using_native() -> None:
    """Let the ops run in plain torch."""
    global _library
    _library = None


def library(*tensors: torch.Tensor) -> ctypes.CDLL | None:
    """The library, where it can work with these tensors: on the CPU, fp32 or bf16."""
    for tensor in tensors:
        if not tensor.is_cpu or tensor.dtype not in _FLOATS:
            return None
    return _library


def _identity(compiler: str, machine: str) -> str:
    """A hash of everything that the library depends on."""
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, check=True).stdout
    target = [compiler, f"-march={machine}", "-Q", "--help=target"]
    instructions = subprocess.run(target, capture_output=True, text=True, check=True).stdout
    parts = [version, instructions, " ".join(FLAGS)]
    parts += [path.read_text() for path in sorted(SOURCES.iterdir())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]
