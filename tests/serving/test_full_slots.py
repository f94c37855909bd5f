"""Triton's sequence slots all taken: what is forwarded into `llm` then waits in Triton, unseen by the engine."""

import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import psutil
import pytest

from kvloom import config as config_module
from kvloom.launcher.launch import Server
from kvloom.launcher.repository import SOURCE, ModelRepository
from kvloom_client import Client, Unavailable
from support.server import Footprint
from support.tiny_models import make_tiny

SLOTS = 2
QUEUE_TIMEOUT_S = 10
"""The doors' own limit for a call that waits in Triton."""

PROMPT = {"text_input": "What is a cache?", "max_tokens": 4, "temperature": 0.0}


@pytest.fixture
def few_slots(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A server of a tiny model whose Triton has two slots for sequences."""
    source = tmp_path / "repository"
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    config = source / "llm" / "config.pbtxt"
    text = config.read_text()
    assert "max_candidate_sequences: 65536" in text
    config.write_text(text.replace("max_candidate_sequences: 65536", f"max_candidate_sequences: {SLOTS}"))
    # a start with so few slots is refused
    monkeypatch.setattr(config_module, "SPARE_SLOTS", -10_000)
    model = source / "llm" / "1" / "model.py"
    model.write_text(f"import kvloom.config\n\nkvloom.config.SPARE_SLOTS = -10_000\n\n{model.read_text()}")
    settings = {"model": str(make_tiny(tmp_path / "model")), "kv_blocks": "64", "block_size": "16", "threads": "1"}
    with Server.start(ModelRepository(settings, source), exit_timeout_s=5) as server:
        yield server


@contextmanager
def slots_taken(client: Client) -> Iterator[None]:
    """Conversations that are begun and not ended; they hold every slot."""
    with ExitStack() as ends:
        for number in range(SLOTS):
            talk = client.conversation(f"holder-{number}")
            talk.generate(**PROMPT, timeout=10)
            # with an end flag: another request, such as a control, would find no slot
            ends.callback(talk.generate, **PROMPT, last=True, timeout=10)
        yield


def threads_of_generate(server: Server) -> int:
    """Threads of `generate`'s Python process."""
    for process in psutil.Process(server.process.pid).children():
        if any("models/generate/" in part for part in process.cmdline()):
            return process.num_threads()
    raise AssertionError(f"no process of generate: {Footprint(server.process.pid).processes()}")


def test_generate_neither_hangs_nor_leaves_a_thread_behind(few_slots):
    with Client(few_slots.grpc_url) as client:
        expected = client.generate(**PROMPT, model="generate").text
        before = threads_of_generate(few_slots)
        with slots_taken(client):
            begun = time.monotonic()
            left = client.stream(**PROMPT, model="generate")
            time.sleep(0.5)
            left.cancel()
            assert list(left) == []
            with pytest.raises(Unavailable, match="no free slot"):
                client.generate(**PROMPT, model="generate", timeout=30)
            assert time.monotonic() - begun < QUEUE_TIMEOUT_S + 30
            # a cancel that was sent just before its request expired waits as long once more
            while threads_of_generate(few_slots) > before:
                assert time.monotonic() - begun < 2 * QUEUE_TIMEOUT_S + 30
                time.sleep(0.2)
        assert client.generate(**PROMPT, model="generate", timeout=30).text == expected
