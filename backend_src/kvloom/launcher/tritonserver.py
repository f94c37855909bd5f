"""Finds a tritonserver and what it needs to run: a Python backend with a stub, and libraries."""

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
    """A tritonserver that can be started.

    Attributes:
        binary: the executable.
        backends: directory with the ``python`` backend and its stub.
        libraries: directories that the dynamic linker needs, searched first.
    """

    binary: Path
    backends: Path
    libraries: tuple[Path, ...] = ()

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        """The environment to start it in; ``inherited`` is the launcher's own."""
        # Google's platform sets AIP_...; Triton would open another door for it, in front of which nothing stands
        environment = {name: value for name, value in inherited.items() if not name.startswith("AIP_")}
        # the stub takes its packages from the first python3 on PATH: the one that kvloom runs in
        environment["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), environment.get("PATH", os.defpath)])
        if self.libraries:
            inherited_path = environment.get("LD_LIBRARY_PATH", "")
            paths = [*map(str, self.libraries), *filter(None, [inherited_path])]
            environment["LD_LIBRARY_PATH"] = os.pathsep.join(paths)
        return environment


def find(binary: Path | None, workdir: Path) -> Installation:
    """Find a tritonserver: the one given, else one on PATH, else the one in the nvidia-pytriton wheel.

    Args:
        binary: path of a tritonserver, or None to look for one.
        workdir: where a private backend directory may be built; must live as long as the server.

    Raises:
        LaunchError: there is none, or it lacks its Python backend or libpython; says what to install.
    """
    if binary is not None and not (binary.is_file() and os.access(binary, os.X_OK)):
        raise LaunchError(f"tritonserver {binary}: no such executable file")
    found = binary or _on_path() or _in_wheel()
    # an installation is PREFIX/bin/tritonserver and PREFIX/backends, whatever links lead to it
    binary = found.resolve()
    prefix = binary.parent.parent
    if (prefix / "backends" / "python" / STUB).is_file():
        return Installation(binary, prefix / "backends")
    if (prefix / "python_backend_stubs").is_dir():
        libraries = (prefix.parent.parent / "nvidia_pytriton.libs", libpython_directory(VERSION))
        return Installation(binary, _private_backends(prefix, workdir), libraries)
    raise LaunchError(
        f"tritonserver {binary} has no Python backend: {prefix / 'backends' / 'python' / STUB} is missing; "
        "install Triton's Python backend there or name another server with --tritonserver"
    )


def _on_path() -> Path | None:
    found = shutil.which("tritonserver")
    return Path(found) if found else None


def _in_wheel() -> Path:
    # find_spec, because importing pytriton takes seconds
    spec = importlib.util.find_spec("pytriton")
    for package in (spec.submodule_search_locations or ()) if spec else ():
        binary = Path(package) / "tritonserver" / "bin" / "tritonserver"
        if binary.is_file():
            return binary
    raise LaunchError(
        "no tritonserver found: none on PATH and none in this Python's packages; "
        "pip install 'kvloom[tritonserver]' brings one, or name one with --tritonserver PATH"
    )


def _private_backends(prefix: Path, workdir: Path) -> Path:
    """Lay the wheel's Python backend and the stub of this Python's version side by side, as Triton wants them."""
    stub = prefix / "python_backend_stubs" / VERSION / STUB
    if not stub.is_file():
        known = ", ".join(sorted(path.name for path in (prefix / "python_backend_stubs").iterdir()))
        raise LaunchError(f"tritonserver {prefix} has no stub for Python {VERSION}, only for {known}; use one of these")
    backend = workdir / "backends" / "python"
    backend.mkdir(parents=True)
    for file in (prefix / "backends" / "python").iterdir():
        if file.is_file():
            (backend / file.name).symlink_to(file)
    (backend / STUB).symlink_to(stub)
    return backend.parent


def libpython_directory(version: str) -> Path:
    """The directory of the shared library of this Python, which the stub is linked to.

    Args:
        version: this Python's, like ``3.11``.

    Raises:
        LaunchError: it is nowhere; says what to install.
    """
    name = f"libpython{version}.so.1.0"
    beside = [Path(sysconfig.get_config_var("LIBDIR")), Path(sys.base_prefix) / "lib"]
    for directory in beside:
        if (directory / name).is_file():
            return directory
    if find_library(f"python{version}") == name:
        return beside[0]  # the linker finds it without help
    raise LaunchError(
        f"{name} not found (looked in {beside[0]}, {beside[1]} and the linker's own paths): Triton's Python backend "
        f"needs it. Install it (Debian and Ubuntu: apt install libpython{version}; pyenv: build with --enable-shared)"
    )
