"""The C++ ops in tests, and pytest options that simulate another machine or a machine without a compiler."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest

from kvloom.models.fetch import cache_folder
from kvloom.ops.native import use_native

COMPILERS = ("g++", "c++")

_hidden = False


def add_options(parser: pytest.Parser) -> None:
    group = parser.getgroup("kvloom")
    group.addoption("--machine", metavar="ARCH", help="build the C++ ops for another machine, a value of -march")
    group.addoption("--no-compiler", action="store_true", help="hide the C++ compiler and skip tests that need it")


def apply_options(config: pytest.Config) -> None:
    """Change PATH for tests and their servers: put another compiler first, or hide the compiler."""
    global _hidden
    machine, _hidden = config.getoption("--machine"), config.getoption("--no-compiler")
    if hasattr(config, "workerinput") or not (machine or _hidden):
        return  # a worker inherits the changed PATH
    temporary = tempfile.TemporaryDirectory(prefix="kvloom-compiler-")
    config.add_cleanup(temporary.cleanup)
    folder = Path(temporary.name)
    if _hidden:
        for directory in reversed(os.get_exec_path()):
            for program in Path(directory).glob("*"):
                link = folder / program.name
                link.unlink(missing_ok=True)
                link.symlink_to(program)
        for name in COMPILERS:
            (folder / name).unlink(missing_ok=True)
        os.environ["PATH"] = str(folder)
    else:
        compiler = shutil.which("g++")
        assert compiler is not None, "there is no compiler"
        script = folder / "g++"
        script.write_text(f'#!/bin/bash\nexec {compiler} "${{@/#-march=native/-march={machine}}}"\n')
        script.chmod(0o755)
        os.environ["PATH"] = f"{folder}{os.pathsep}{os.environ['PATH']}"


def skip_without_compiler() -> None:
    """Skip the test if the compiler is hidden."""
    if _hidden:
        pytest.skip("the compiler is hidden")


def use_compiled(machine: str = "native") -> None:
    """Let the ops use C++. Skips the test if the compiler is hidden."""
    skip_without_compiler()
    assert use_native(cache_folder("ops"), machine), "there is no compiler"
