"""Building the C++ ops: once, and never in silence where it can't be done."""

import errno
import logging
import os
import shutil
from pathlib import Path

import pytest
import torch

from kvloom.models.fetch import cache_folder
from kvloom.ops import native
from kvloom.ops.activation import silu_mul
from kvloom.ops.native import is_buildable, library, stop_using_native, use_native
from kvloom.ops.packed_memory import HUGE_PAGE, SLAB, HugePages
from support.compiled import skip_without_compiler, use_compiled

PLAIN = "the CPU ops run in plain torch, several times slower"


@pytest.fixture(autouse=True)
def _no_library():
    stop_using_native()
    yield
    stop_using_native()


def test_a_built_library_is_found_again(caplog):
    use_compiled()
    caplog.clear()
    assert use_native(cache_folder("ops"))
    assert caplog.text == ""
    assert library(torch.zeros(1)) is not None
    assert library(torch.zeros(1, dtype=torch.float64)) is None


def test_without_a_compiler_the_log_says_so_and_torch_computes(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not use_native(tmp_path / "cache")
    [line] = caplog.messages
    assert line == f"{PLAIN}: no C++ compiler found; install g++"
    assert not is_buildable()
    x = torch.randn(3, 8)
    assert torch.allclose(silu_mul(x), torch.nn.functional.silu(x[:, :4]) * x[:, 4:])


def test_a_compiler_that_fails_is_quoted(tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "g++"
    # it knows what it is asked about itself, but builds nothing
    compiler.write_text('#!/bin/sh\ncase "$*" in *-o*) echo "out of luck" >&2; exit 1;; esac\necho 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    with caplog.at_level(logging.WARNING):
        assert not use_native(tmp_path / "cache")
    assert "out of luck" in caplog.text
    assert list((tmp_path / "cache").iterdir()) == []
    assert not is_buildable()  # memory is planned for torch


def test_a_compiler_that_is_killed_is_told_of(tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "g++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-o*) kill -9 $$;; esac\necho 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin:/usr/bin")
    assert not use_native(tmp_path / "cache")
    assert "SIGKILL" in caplog.text


def test_a_compiler_of_another_kind_is_told_of(tmp_path, monkeypatch, caplog):
    """As clang, which knows no -Q."""
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ncase "$*" in *-Q*) echo "unknown argument" >&2; exit 1;; esac\necho 1\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not use_native(tmp_path / "cache")
    [line] = caplog.messages
    assert line.startswith(f"{PLAIN}: {compiler} is not GCC or does not work (")
    assert line.endswith("); install g++")
    assert not is_buildable()


def test_a_compiler_that_cannot_be_run_is_told_of(tmp_path, monkeypatch, caplog):
    compiler = tmp_path / "g++"
    compiler.write_text("neither a program nor a script\n")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert not use_native(tmp_path / "cache")
    [line] = caplog.messages
    assert line.startswith(f"{PLAIN}: {compiler} is not GCC or does not work (")


@pytest.mark.parametrize("cache", ["/proc/kvloom", "/proc"])
def test_a_cache_that_cannot_be_written_to_is_told_of(cache, caplog):
    """No user can make a folder or a file there, root neither."""
    skip_without_compiler()
    assert not use_native(Path(cache))
    [line] = caplog.messages
    assert line.startswith(PLAIN)
    assert cache in line
    assert line.endswith("; set XDG_CACHE_HOME to a folder that can be written to")
    assert not is_buildable()


def test_a_built_library_is_used_where_nothing_can_be_written(monkeypatch, caplog):
    use_compiled()
    stop_using_native()
    caplog.clear()

    def no_writing(*arguments: object, **named: object) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    for name in ("mkdir", "replace"):
        monkeypatch.setattr(os, name, no_writing)
    assert use_native(cache_folder("ops"))
    assert caplog.messages == []


def test_a_library_that_cannot_be_loaded_is_told_of(tmp_path, monkeypatch, caplog):
    skip_without_compiler()
    monkeypatch.setattr(native, "_identity", lambda compiler, machine: "broken")
    (tmp_path / "broken.so").write_text("no library")
    assert not use_native(tmp_path)
    [line] = caplog.messages
    assert line.startswith(PLAIN)
    assert "broken.so" in line


@pytest.mark.slow
def test_another_source_or_compiler_is_another_library(tmp_path, monkeypatch):
    use_compiled()  # there is a compiler
    real = shutil.which("g++")
    assert real is not None
    monkeypatch.setattr(native, "FLAGS", (*native.FLAGS, "-O0"))  # half the time
    assert use_native(tmp_path)
    first = list(tmp_path.glob("*.so"))
    assert use_native(tmp_path)
    assert list(tmp_path.glob("*.so")) == first
    compiler = tmp_path / "bin" / "g++"
    compiler.parent.mkdir()
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo another || exec {real} "$@"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", f"{compiler.parent}:/bin:/usr/bin")
    assert use_native(tmp_path)
    assert len(list(tmp_path.glob("*.so"))) == 2


def test_weights_lie_in_huge_pages_one_behind_the_other():
    allocate = HugePages()
    first, second = allocate(100), allocate(3 * 2**20)
    assert (first.numel(), second.numel()) == (100, 3 * 2**20)
    assert first.data_ptr() % HUGE_PAGE == 0
    assert second.data_ptr() == first.data_ptr() + 128
    first.fill_(1)
    second.fill_(2)
    assert first.sum() == 100
    if "[madvise]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert huge_bytes(first.data_ptr()) >= HUGE_PAGE
    larger = allocate(SLAB + 1)
    assert larger.numel() == SLAB + 1


def huge_bytes(address: int) -> int:
    """Bytes in huge pages of the mapping that an address lies in."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head:
            start, end = (int(part, 16) for part in head.split("-"))
            inside = start <= address < end
        elif inside and head == "AnonHugePages:":
            return int(line.split()[1]) * 1024
    raise AssertionError("no such mapping")
