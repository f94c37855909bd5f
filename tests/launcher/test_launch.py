import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections import deque

import pytest

from kvloom.errors import LaunchError, ModelError, SettingsError
from kvloom.launcher import ports, tritonserver
from kvloom.launcher.launch import Server
from kvloom.launcher.ports import Ports
from kvloom.launcher.repository import ModelRepository, parse_assignments
from kvloom.launcher.serverlog import ServerLog
from support.launched import KVLOOM, child, health, serve
from support.server import SETTINGS, Footprint, canary


def run(*arguments: str, timeout: float = 60) -> "subprocess.CompletedProcess[str]":
    return subprocess.run([KVLOOM, *arguments], capture_output=True, text=True, timeout=timeout, check=False)


# what is refused before anything is started


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--set", "no_such_setting=1"], "unknown setting 'no_such_setting'"),
        (["--set", "block_size=17"], "block_size='17': .*power of two"),
        (["--set", "block_size"], "expected KEY=VALUE"),
        (["--model", "/no/such/model.gguf"], "/no/such/model.gguf does not exist"),
        (["--tritonserver", "/no/such/tritonserver"], "/no/such/tritonserver: no such executable"),
        (["--model-repository", "/no/such/folder"], "no model repository at /no/such/folder"),
    ],
)
def test_a_bad_argument_is_one_clear_line_and_exit_code_1(arguments, message):
    result = run("serve", "--http-port=0", "--grpc-port=0", "--metrics-port=0", "--health-port=0", *arguments)
    assert result.returncode == 1
    assert result.stdout == ""
    assert re.match(f"kvloom: .*{message}", result.stderr)
    assert result.stderr.count("\n") == 1


@pytest.mark.parametrize("op", ["ping", "flush", "drain"])
def test_an_op_that_is_not_about_a_conversation_takes_no_id(op):
    result = run("control", op, "ada")
    assert (result.returncode, result.stdout) == (2, "")
    assert f"{op} takes no conversation" in result.stderr


@pytest.mark.parametrize("command", ["serve", "generate", "chat", "control", "plan"])
def test_the_help_shows_no_value_after_a_flag(command):
    assert "<bool>" not in run(command, "--help").stdout


def test_a_failure_shows_the_end_of_the_log_without_tables_and_says_where_it_is(tmp_path):
    path = tmp_path / "log"
    path.write_text("of an earlier server\n")
    log = ServerLog(path)
    with log.file as file:
        file.writelines(f"line {number}\n".encode() for number in range(30))
        file.write(b"E1130 failed to load 'llm'\n+----+\n| id | server |\n+----+\nI1130 the last line\n")
    first, *lines = str(log.failure("it has ended", starting=False)).split("\n  | ")
    assert first == f"it has ended; the end of its log ({path}):"
    assert lines == [
        *(f"line {number}" for number in range(12, 30)),
        "E1130 failed to load 'llm'",
        "I1130 the last line",
    ]


def test_a_taken_port_is_named():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} is in use; .*--grpc-port"):
            Ports(grpc=port).resolved()
    with pytest.raises(LaunchError, match="in use"):
        Ports(http=port, metrics=port).resolved()


def test_free_ports_differ():
    free = Ports().resolved()
    assert len({free.http, free.grpc, free.metrics, free.health}) == 4


def test_launchers_do_not_choose_the_same_port(monkeypatch):
    """Though neither has begun to listen: Triton takes seconds to."""
    monkeypatch.setattr(ports, "_CANDIDATES", range(31000, 31008))
    monkeypatch.setattr(ports, "_claims", deque())
    chosen = [Ports().resolved() for _ in range(2)]
    assert len({port for one in chosen for port in (one.http, one.grpc, one.metrics, one.health)}) == 8
    code = "from kvloom.launcher import ports; ports._CANDIDATES = range(31000, 31012); print(ports.Ports().resolved())"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300)
    assert set(re.findall(r"\d{5}", other.stdout)) == {"31008", "31009", "31010", "31011"}, other.stderr
    with pytest.raises(LaunchError, match="no free port among 31000 to 31007"):
        Ports().resolved()


def test_a_server_given_by_its_path_brings_its_own_backend(tmp_path):
    binary = tmp_path / "bin" / "tritonserver"
    binary.parent.mkdir()
    binary.touch(mode=0o755)
    with pytest.raises(LaunchError, match="has no Python backend"):
        tritonserver.find(binary, tmp_path)
    stub = tmp_path / "backends" / "python" / tritonserver.STUB
    stub.parent.mkdir(parents=True)
    stub.touch(mode=0o755)
    found = tritonserver.find(binary, tmp_path)
    assert (found.binary, found.backends, found.libraries) == (binary, tmp_path / "backends", ())


def test_a_server_on_path_comes_before_the_wheel(tmp_path, monkeypatch):
    (tmp_path / "tritonserver").touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(LaunchError, match=re.escape(str(tmp_path / "tritonserver"))):
        tritonserver.find(None, tmp_path)


def test_no_server_anywhere_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(LaunchError, match=r"pip install 'kvloom\[tritonserver\]'"):
        tritonserver.find(None, tmp_path)


def test_a_missing_libpython_says_what_to_install():
    with pytest.raises(LaunchError, match=r"libpython3\.99\.so\.1\.0 not found.*apt install libpython3\.99"):
        tritonserver.libpython_directory("3.99")


def test_settings_reach_the_repository(tmp_path):
    model = tmp_path / "model.gguf"
    model.touch()
    ModelRepository({"model": str(model), "max_running": "3"}).write(tmp_path / "models")
    again = ModelRepository({}, tmp_path / "models")  # reads what was written
    again.write(tmp_path / "copy")
    text = (tmp_path / "copy" / "llm" / "config.pbtxt").read_text()
    assert re.search(r'"max_running"\s*value\s*{\s*string_value: "3"', text)
    assert f'string_value: "{model}"' in text
    assert (tmp_path / "copy" / "llm" / "1" / "model.py").is_file()


def test_assignments():
    assert parse_assignments(["a=1", " b = x=y "]) == {"a": "1", "b": "x=y"}
    with pytest.raises(SettingsError, match="KEY=VALUE"):
        parse_assignments(["=1"])


def test_a_relative_model_is_found_and_made_absolute(tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    ModelRepository({"model": "model.gguf"}).write(tmp_path / "models")
    assert str(tmp_path / "model.gguf") in (tmp_path / "models" / "llm" / "config.pbtxt").read_text()
    with pytest.raises(ModelError, match="does not exist"):
        ModelRepository({"model": "other.gguf"})


# real servers


def test_the_running_server_is_ready_and_answers(server):
    assert server.ready
    footprint = Footprint(server.process.pid)
    assert len(footprint.processes()) >= 2
    assert len(footprint.shared_memory()) >= 1
    canary(server)


def test_a_model_that_can_not_be_served_says_why(tmp_path):
    log = tmp_path / "log"
    with pytest.raises(LaunchError, match="^can't start llm: setting context_length=9999999: the model"):
        Server.start(ModelRepository(SETTINGS | {"context_length": "9999999"}), log_file=log)
    found = re.search(r"shm-region-prefix-name\S*?(kvloom-[0-9a-f]+-)", log.read_text())
    assert found is not None
    assert [name for name in os.listdir("/dev/shm") if name.startswith(found[1])] == []


def test_sigint_during_startup_leaves_nothing():
    port = Ports().resolved().health
    serving = serve(f"--health-port={port}")
    try:
        footprint = child(serving)
        assert health(port) == 503
        while not footprint.shared_memory():  # the stub is starting
            assert serving.poll() is None
            time.sleep(0.02)
        serving.send_signal(signal.SIGINT)
        output, errors = serving.communicate(timeout=60)
        assert serving.returncode == 128 + signal.SIGINT
        assert output == ""
        assert "Traceback" not in errors
        footprint.assert_gone()
    finally:
        serving.kill()
        serving.communicate()


def test_generate_streams_an_answer_and_its_speed(server):
    result = run(
        "generate",
        "--url",
        server.grpc_url,
        "--raw",
        "The capital city of France is",
        "--max-tokens=5",
        "--temperature=0",
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == " Paris.\n\nThe\n"
    assert re.fullmatch(r"first token after \d+ ms, 5 tokens, \d+\.\d tokens/s\n", result.stderr)


def test_generate_tells_errors_in_one_line(server):
    refused = run("generate", "--url", server.grpc_url, "hello", "--temperature=-1")
    assert (refused.returncode, refused.stdout) == (1, "")
    assert re.fullmatch(r"kvloom: INVALID_ARG: temperature: .*\n", refused.stderr)
    unreachable = run("generate", "--url", "127.0.0.1:1", "hello")
    assert (unreachable.returncode, unreachable.stdout) == (1, "")
    assert re.fullmatch(r"kvloom: no server answers at 127\.0\.0\.1:1 .*\n", unreachable.stderr)


def test_ctrl_c_interrupts_generate(server):
    command = [KVLOOM, "generate", "--url", server.grpc_url, "--raw", "Count: 1, 2, 3,", "--max-tokens=8000"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        assert running.stdout.read(1)
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=20)
        assert running.returncode == 128 + signal.SIGINT
        assert errors.startswith("first token after")
        assert "Traceback" not in errors
    finally:
        running.kill()
        running.communicate()
    canary(server)


def test_a_user_without_a_cache_folder_serves_in_plain_torch(tiny, monkeypatch):
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", "/proc")  # nobody can make a folder there
    with tiny.serve() as server, tiny.client(server), open(server._log._path) as log:
        [line] = [line for line in log if "plain torch" in line]
    assert "XDG_CACHE_HOME" in line
