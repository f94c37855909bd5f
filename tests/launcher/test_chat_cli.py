"""`kvloom chat` against the real server, through a pipe and at a (pseudo) terminal."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from kvloom.launcher.interrupts import Interrupts
from kvloom.launcher.terminal import ChatSession
from support.server import assert_idle, canary

KVLOOM = str(Path(sys.executable).parent / "kvloom")
SPEED = r"first token after \d+ ms, \d+ tokens(, \d+\.\d tokens/s)?"
FRANCE = "What is the capital of France?"


def piped(server, text: str, *options: str) -> subprocess.CompletedProcess:
    command = [KVLOOM, "chat", "--url", server.grpc_url, "--temperature=0", "--max-tokens=12", *options]
    return subprocess.run(command, input=text, capture_output=True, text=True, timeout=120)


class Terminal:
    """`kvloom chat` at a pseudo terminal."""

    def __init__(self, *options: str):
        self.seen = ""
        self._master, slave = pty.openpty()
        environment = os.environ | {"TERM": "xterm", "NO_COLOR": "1"}
        self.process = subprocess.Popen(
            [KVLOOM, "chat", *options],
            stdin=slave,
            stdout=slave,
            stderr=slave,
            env=environment,
            # a session of its own, whose terminal this is: Ctrl-C then comes as a key
            preexec_fn=lambda: os.login_tty(slave),
        )
        os.close(slave)

    def type(self, text: str) -> None:
        os.write(self._master, text.encode())

    def wait_for(self, pattern: str, within: float = 60.0) -> str:
        """Read until the pattern shows up; returns and forgets everything up to its end."""
        deadline = time.monotonic() + within
        while not (found := re.search(pattern, self.seen, re.DOTALL)):
            ready, _, _ = select.select([self._master], [], [], max(0.0, deadline - time.monotonic()))
            assert ready, f"no {pattern!r} in {self.seen!r}"
            self.seen += os.read(self._master, 4096).decode(errors="replace")
        text, self.seen = self.seen[: found.end()], self.seen[found.end() :]
        return text

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *error: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._master)


@pytest.fixture
def terminal(server):
    with Terminal("--url", server.grpc_url, "--temperature=0", "--max-tokens=4000") as terminal:
        terminal.wait_for("> ")
        yield terminal
    assert_idle(server)


def test_a_piped_conversation_remembers(server, client):
    result = piped(server, f"{FRANCE}\n\nAnd of Germany?\n")
    assert result.returncode == 0, result.stderr
    assert re.fullmatch(rf"{SPEED}\n{SPEED}\n", result.stderr), result.stderr
    first, second = result.stdout.splitlines()
    messages = [{"role": "user", "content": FRANCE}]
    assert client.generate(messages=messages, temperature=0.0, max_tokens=12).text == first
    messages += [{"role": "assistant", "content": first}, {"role": "user", "content": "And of Germany?"}]
    assert client.generate(messages=messages, temperature=0.0, max_tokens=12).text == second


def test_reset_system_and_quit(server, client):
    system = "Answer in capital letters."
    result = piped(server, f"{FRANCE}\n/reset\n/system {system}\n{FRANCE}\n/reset\n/system\n{FRANCE}\n/quit\nignored\n")
    assert result.returncode == 0, result.stderr
    plain, instructed, again = result.stdout.splitlines()
    assert plain == again
    messages = [{"role": "system", "content": system}, {"role": "user", "content": FRANCE}]
    assert client.generate(messages=messages, temperature=0.0, max_tokens=12).text == instructed
    assert piped(server, f"{FRANCE}\n", "--system", system).stdout.splitlines() == [instructed]


def test_unknown_commands_are_told(server):
    result = piped(server, "/nonsense\n/help\n")
    assert (result.returncode, result.stdout) == (0, "")
    assert "unknown command /nonsense" in result.stderr
    assert result.stderr.count("/system TEXT") == 2


def test_a_failed_turn_ends_a_piped_conversation(server):
    result = piped(server, f"{FRANCE}\n{FRANCE}\n", "--top-k=-7")
    assert (result.returncode, result.stdout) == (1, "")
    assert re.fullmatch(r"kvloom: INVALID_ARG: top_k: .*\n", result.stderr)


def test_input_that_is_not_text_is_no_crash(server):
    command = [KVLOOM, "chat", "--url", server.grpc_url, "--max-tokens=1"]
    result = subprocess.run(command, input=b"caf\xe9\n", capture_output=True, timeout=120)
    assert result.returncode == 0, result.stderr


def test_ctrl_c_interrupts_the_answer_and_keeps_the_conversation(server, terminal):
    terminal.type("Write a very long story about a lighthouse.\n")
    terminal.wait_for(r"lighthouse\.\r\n.{20}")
    terminal.type("\x03")
    terminal.wait_for(SPEED + ".*> ", within=10)
    assert_idle(server, conversations=True)
    # the story and the question are still known
    terminal.type("Where does the story take place? Answer in three words.\n")
    answer = terminal.wait_for(SPEED + ".*> ")
    assert "lighthouse" in answer.lower().split("three words.", 1)[1]
    terminal.type("\x04")
    assert terminal.process.wait(10) == 0


def test_a_conversation_that_the_server_has_lost_is_told_again(server, client, monkeypatch, capsys):
    lines = iter([FRANCE, "And of Germany?"])
    with Interrupts() as interrupts:
        chat = ChatSession(client, {"temperature": 0.0, "max_tokens": 12}, interrupts)

        def type_next(prompt: str) -> str:
            if chat._history:
                client.control("end", chat._conversation.id)
            try:
                return next(lines)
            except StopIteration:
                raise EOFError from None

        monkeypatch.setattr("builtins.input", type_next)
        monkeypatch.setattr("sys.stdin", open(os.devnull))  # noqa: SIM115 - closed with the test
        chat.run()
    captured = capsys.readouterr()
    assert "sending all messages again" in captured.err
    first, second = captured.out.splitlines()
    messages = [{"role": "user", "content": FRANCE}, {"role": "assistant", "content": first}]
    messages += [{"role": "user", "content": "And of Germany?"}]
    assert client.generate(messages=messages, temperature=0.0, max_tokens=12).text == second
    assert_idle(server)


def test_ctrl_c_at_the_prompt_leaves(terminal):
    terminal.type("half a line")
    terminal.wait_for("half a line")
    # CPython's input() misses a signal that comes while it takes a key, until the next key
    time.sleep(0.3)
    terminal.type("\x03")
    assert terminal.process.wait(10) == 0


def test_an_error_at_a_terminal_is_told_and_the_conversation_goes_on(server):
    with Terminal("--url", "127.0.0.1:1") as terminal:
        terminal.wait_for("> ")
        terminal.type("Hello\n")
        terminal.wait_for(r"kvloom: no server answers at 127\.0\.0\.1:1 .*> ")
        terminal.type("/quit\n")
        assert terminal.process.wait(10) == 0


def test_sigterm_ends_it_in_the_middle_of_an_answer(server, terminal):
    terminal.type("Write a very long story about a lighthouse.\n")
    terminal.wait_for(r"lighthouse\.\r\n.{10}")
    terminal.process.send_signal(signal.SIGTERM)
    assert terminal.process.wait(10) == 128 + signal.SIGTERM
    canary(server)
