"""The README's code does what the README says."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from support.server import assert_idle, canary

README = (Path(__file__).parents[1] / "README.md").read_text()
SNIPPETS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


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


def test_the_error_in_the_readme_is_the_real_one(client):
    from kvloom_client import InvalidArgument

    [text] = re.findall(r"`(INVALID_ARG: temperature: [^`]+)`", README)
    with pytest.raises(InvalidArgument) as caught:
        client.generate(text_input="Hello", temperature=-1.0)
    assert str(caught.value) == text
