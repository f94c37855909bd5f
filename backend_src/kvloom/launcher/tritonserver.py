"""Finds a tritonserver, its Python backend with a stub, and the libraries that they need."""

import importlib.util
import os
import shutil
import sys
import sysconfig
from collections.abc import Mapping
from ctypes.util import find_library
from dataclasses import dataclass
from pathlib import Path

from kvloom.errors import LaunchError

STUB = "triton_python_backend_stub"
VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"


@dataclass(frozen=True)
class Installation:
    """An installed tritonserver.

    Attributes:
        binary: the executable.
        backends: the directory with the ``python`` backend and its stub.
        libraries: directories that the dynamic linker must search first.
    """

    binary: Path
    backends: Path
    libraries: tuple[Path, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment for its process. ``inherited`` is the launcher's own environment."""
        # Google's Vertex AI sets AIP_...; Triton then opens another endpoint, which has no access restrictions
        environment = {name: value for name, value in inherited.items() if not name.startswith("AIP_")}
        # The stub uses the packages of the first python3 on PATH, which must be the Python that kvloom runs in
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        if self.libraries:
            inherited_path = environment.get("LD_LIBRARY_PATH", "")
            paths = [*map(str, self.libraries), *filter(None, [inherited_path])]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        return environment


def find(binary: Path | None, workdir: Path) -> Installation:
    """Find a tritonserver: the given one, else one on PATH, else the one in the nvidia-pytriton wheel.

    Args:
        binary: the path of a tritonserver; None to look for one.
        workdir: a directory for a private backend directory. It must exist as long as the server runs.

    Raises:
        LaunchError: there is none, or its Python backend or libpython is missing. The message says what to install.
    """
    if binary is not None and not (binary.is_file() and os.access(binary, os.X_OK)):
        raise LaunchError(f"tritonserver {binary}: no such executable file")
    found = binary or _on_path() or _in_wheel()
    # An installation has PREFIX/bin/tritonserver and PREFIX/backends; `found` may be a link to it
    binary = found.resolve()
    prefix = binary.parent.parent
    if (prefix / "backends" / "python" / STUB).is_file():
        return Installation(binary, prefix / "backends")
    if (prefix / "python_backend_stubs").is_dir():
        libraries = (prefix.parent.parent / "nvidia_pytriton.libs", libpython_directory(VERSION))
        return Installation(binary, _private_backends(prefix, workdir), libraries)
    raise LaunchError(
        f"tritonserver {binary} has no Python backend: {prefix / 'backends' / 'python' / STUB} is missing; "
        "install Triton's Python backend there, or give another server with --tritonserver PATH"
    )


def _on_path() -> Path | None:
    found = shutil.which("tritonserver")
    return Path(found) if found else None


def _in_wheel() -> Path:
    # Found by find_spec, because importing pytriton takes seconds
    spec = importlib.util.find_spec("pytriton")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(package) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    raise LaunchError(
        "no tritonserver found, neither on PATH nor in this Python's packages; "
        "install one with pip install 'kvloom[tritonserver]', or give one with --tritonserver PATH"
    )


def _private_backends(prefix: Path, workdir: Path) -> Path:
    """Link the wheel's Python backend and the stub for this Python version into one directory, as Triton expects."""
    stub = prefix / "python_backend_stubs" / VERSION / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in (prefix / "python_backend_stubs").iterdir()))
        raise LaunchError(f"tritonserver {prefix} has no stub for Python {VERSION}; use a Python of these: {known}")
    backend = workdir / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (prefix / "backends" / "python").iterdir():
        if file.is_file():
            (backend / file.name).symlink_to(file)
    (backend / STUB).symlink_to(stub)
    return backend.parent


def libpython_directory(version: str) -> Path:
    """The directory of this Python's shared library, which the stub is linked to.

    Args:
        version: this Python's version, like ``3.11``.

    Raises:
        LaunchError: the library was not found. The message says what to install.
    """
    name = f"libpython{version}.so.1.0"
    places = [Path(sysconfig.get_config_var("LIBDIR")), Path(sys.base_prefix) / "lib"]
    for directory in places:
        if (directory / name).is_file():
            return directory
    if find_library(f"python{version}") == name:
        return places[0]  # the linker finds it by itself
    raise LaunchError(
        f"{name} not found (looked in {places[0]}, {places[1]} and the linker's own paths): Triton's Python backend "
        f"needs it. Install it (Debian and Ubuntu: apt install libpython{version}; pyenv: build with --enable-shared)"
    )
