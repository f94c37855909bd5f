"""The client alone, in an environment of its own, with the oldest and the newest of what it needs."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from support.server import assert_idle, canary

CLIENT = Path(__file__).parents[2] / "client"
DEPENDENCIES = tomllib.loads((CLIENT / "pyproject.toml").read_text())["project"]["dependencies"]
OLDEST = [re.sub(r"(\[\w+\])?>=([\d.]+).*", r"==\2", dependency) for dependency in DEPENDENCIES]

ASKS = """
import asyncio, sys
from kvloom_client import AsyncClient, Client, HttpClient
ASKED = dict(text_input="The capital city of France is", max_tokens=5, temperature=0.0, timeout=120)
async def ask(url):
    async with AsyncClient(url) as client:
        return (await client.generate(**ASKED)).text
grpc, http = sys.argv[1:]
with Client(grpc) as client, HttpClient(http) as door:
    answers = {client.generate(**ASKED).text, door.generate(**ASKED).text, asyncio.run(ask(grpc))}
    answers.add("".join(chunk.text for chunk in door.stream(**ASKED)))
    for conversation in (client.conversation(), client.conversation("seven")):
        answers.add("".join(chunk.text for chunk in conversation.stream(**ASKED)))
        conversation.end(timeout=60)
print(answers)
"""


def test_nothing_is_pinned():
    assert len(OLDEST) == 3
    assert all(re.fullmatch(r"\w+==[\d.]+", pin) for pin in OLDEST)
    assert not [dependency for dependency in DEPENDENCIES if "==" in dependency]


@pytest.mark.full  # installs packages
@pytest.mark.parametrize("constraints", [OLDEST, []], ids=["oldest", "newest"])
def test_the_client_alone_talks_to_the_server(server, tmp_path, constraints):
    (tmp_path / "constraints.txt").write_text("\n".join(constraints))
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "venv"], check=True)
    python = tmp_path / "venv" / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet", "--no-input", "-c", tmp_path / "constraints.txt"]
    # a copy: a build leaves its folders beside the sources
    copied = tmp_path / "client"
    subprocess.run(["cp", "-r", CLIENT, copied], check=True)
    subprocess.run([*pip, copied], check=True)
    asked = [python, "-c", ASKS, server.grpc_url, server.http_url]
    run = subprocess.run(asked, capture_output=True, text=True, timeout=300, cwd=tmp_path)
    assert run.returncode == 0, run.stderr
    assert run.stdout == "{' Paris.\\n\\nThe'}\n"
    canary(server)
    assert_idle(server)
