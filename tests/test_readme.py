"""The README's code does what the README says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from kvloom.config import Settings
from kvloom.request import SamplingParams
from support.server import assert_idle, canary

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def section(title: str) -> str:
    return README.split(f"## {title}\n", 1)[1].split("\n## ", 1)[0]


def first_column(table: str) -> set[str]:
    cells = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_there_are_snippets():
    assert ["tritonclient" in snippet for snippet in SNIPPETS] == [True, False, False]


@pytest.mark.parametrize("snippet", SNIPPETS, ids=["tritonclient", "kvloom_client", "conversation"])
def test_snippet(server, snippet):
    assert "127.0.0.1:8001" in snippet
    code = snippet.replace("127.0.0.1:8001", server.grpc_url)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.split()) >= 3, run.stdout
    if "conversation" in snippet:
        assert re.search(r"^\d+ \d+ \{.*'busy': False", run.stdout, re.MULTILINE), run.stdout
    elif "kvloom_client" in snippet:
        assert " Paris." in run.stdout
        assert run.stdout.endswith("length 8\n")
    canary(server)
    assert_idle(server)


@pytest.mark.parametrize("command", ["serve", "plan"])
def test_the_help_lists_the_settings(command):
    run = [str(Path(sys.executable).parent / "kvloom"), command, "--help"]
    text = subprocess.run(run, capture_output=True, text=True, timeout=60, check=True).stdout
    listed = re.search(r"Settings: ([\w,\s]+)\.", text)
    assert listed
    assert re.split(r",\s+", listed[1]) == Settings.names()


CALLS = re.findall(r"```bash\n(.*?)```", README, re.DOTALL)


def test_curl_calls(server):
    assert len(CALLS) == 2
    whole, streamed = (
        subprocess.run(
            ["bash", "-ec", call.replace("127.0.0.1:8000", server.http_url.removeprefix("http://"))],
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        ).stdout
        for call in CALLS
    )
    assert json.loads(whole)["text_output"] == "The capital city of France is Paris.\n\nThe United States has"
    events = [json.loads(line.removeprefix("data: ")) for line in streamed.splitlines() if line]
    assert len(events) > 1
    text = "".join(event["text_output"] for event in events)
    assert text
    assert "\n\n" not in text
    canary(server)
    assert_idle(server)


def test_every_setting_is_described():
    assert first_column(section("Settings")) == {n for n in Settings.model_fields if not n.startswith("test_")}


def test_every_sampling_key_is_described():
    assert first_column(section("Calling it").split("| sampling key |")[1]) == set(SamplingParams.model_fields)


def test_every_input_is_described():
    config = (Path(__file__).parents[1] / "model_repository" / "llm" / "config.pbtxt").read_text()
    inputs = set(re.findall(r'name: "(\w+)".*optional', config))
    assert first_column(section("Calling it").split("| sampling key |")[0]) == inputs
    outputs = set(re.findall(r'name: "(\w+)" data_type: \w+ dims: \[ ?-?\d+ ?\] }', config))
    assert outputs
    assert all(f"`{name}`" in section("Calling it") for name in outputs)


def test_defaults_in_the_tables_are_the_defaults():
    rows = re.findall(r"^\| `(\w+)` \| `?([\w.-]+)`? \|", section("Settings"), re.MULTILINE)
    assert {name for name, _ in rows} == first_column(section("Settings"))
    for name, default in rows:
        assert (str(Settings.model_fields[name].default) or "none").lower() == default.lower()
    rows = re.findall(r"^\| `(\w+)` \| ([\d.-]+) \|", section("Calling it"), re.MULTILINE)
    assert len(rows) >= 4
    for name, default in rows:
        assert str(SamplingParams.model_fields[name].default) == default


def test_the_error_in_the_readme_is_the_real_one(client):
    from kvloom_client import InvalidArgument

    [text] = re.findall(r"`(INVALID_ARG: temperature: [^`]+)`", README)
    with pytest.raises(InvalidArgument) as caught:
        client.generate(text_input="Hello", temperature=-1.0)
    assert str(caught.value) == text
