"""Servers with a tiny random model, which start in seconds and compute a step in milliseconds."""

import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import torch
from transformers import AutoModelForCausalLM

from kvloom.launcher.launch import Server
from kvloom.launcher.processes import stubs_of
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Answer, Client
from support.server import assert_idle, eventually, metrics
from support.tiny_models import make_tiny

BLOCK = 16
GREEDY = {"temperature": 0.0, "ignore_eos": True}
CANARY = {"input_ids": list(range(40, 60)), "max_tokens": 16, **GREEDY}


class Tiny:
    """A tiny model, and servers with it."""

    def __init__(self, folder: Path, context: int = 4096):
        self.folder = make_tiny(folder, max_position_embeddings=context)
        model = AutoModelForCausalLM.from_pretrained(folder)
        # A random model may sample the end token; the canary ignores it
        model.generation_config.eos_token_id = None
        prompt = torch.tensor([CANARY["input_ids"]])
        out = model.generate(prompt, max_new_tokens=CANARY["max_tokens"], do_sample=False, pad_token_id=0)
        self._canary = tuple(out[0, prompt.shape[1] :].tolist())

    @contextmanager
    def serve(self, **settings: object) -> Iterator[Server]:
        """A server with this model, in fp32 on one thread."""
        chosen = {"weights": "fp32", "threads": 1, "block_size": BLOCK, "kv_blocks": 1024, **settings}
        repository = ModelRepository({"model": str(self.folder), **{key: str(value) for key, value in chosen.items()}})
        with Server.start(repository, exit_timeout_s=5) as server:
            yield server

    @contextmanager
    def client(self, server: Server) -> Iterator[Client]:
        """A client of a server. At the end the server must be idle and give a correct answer."""
        with Client(server.grpc_url) as client:
            yield client
            assert client.generate(**CANARY, timeout=60).token_ids == self._canary
            assert_idle(server)


@contextmanager
def serve_folder(model: Path) -> Iterator[Client]:
    """A client of a server of a small model's folder. The server must be idle at the end."""
    settings = {"model": str(model), "weights": "fp32", "kv_blocks": "64", "block_size": "16", "threads": "1"}
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server, Client(server.grpc_url) as client:
        yield client
        assert_idle(server)


def tokens(seed: int, count: int) -> list[int]:
    """A random prompt without special tokens."""
    rng = random.Random(seed)
    return [rng.randrange(3, 300) for _ in range(count)]


def ask(client: Client, requests: Iterable[dict[str, Any]], at_once: int = 8) -> list[Answer]:
    """The answers to requests with their usage. Runs ``at_once`` requests at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        return list(pool.map(lambda one: client.generate(**one, return_usage=True, timeout=300), requests))


def found(answer: Answer) -> int:
    """How many of the prompt's tokens were in the prefix cache."""
    assert answer.usage is not None
    return answer.usage["cached_tokens"]


def blocks(server: Server) -> dict[str, float]:
    """The number of blocks of an idle server by state."""
    assert_idle(server)
    seen = metrics(server)
    return {state: seen[f'kvloom_blocks{{state="{state}"}}'] for state in ("free", "used", "cached", "swapped")}


def stub(server: Server, model: str = "llm") -> psutil.Process:
    """The process that runs a model's Python."""
    return stubs_of(server.process.pid)[model]


def request(seed: int, length: int = 100, max_tokens: int = 8, **more: Any) -> dict[str, Any]:
    return {"input_ids": tokens(seed, length), "max_tokens": max_tokens, **GREEDY, **more}


def counted(server: Server, ends: int, act: Callable[[], Any]) -> Counter[str]:
    """The increase of an idle server's metrics by ``act``, which ends ``ends`` requests."""
    assert_idle(server)
    before = settled(server)

    def ended() -> bool:
        # A scrape may still see the idle state before act()
        now = metrics(server)
        return now["kvloom_e2e_seconds_count"] - before["kvloom_e2e_seconds_count"] == ends

    act()
    eventually(ended)
    assert_idle(server)
    return Counter({name: value - before.get(name, 0) for name, value in settled(server).items()})


def settled(server: Server) -> dict[str, float]:
    """An idle server's metrics when they no longer change: after many steps, histograms are updated late."""
    seen: list[dict[str, float]] = [{}]

    def still() -> bool:
        time.sleep(0.5)
        seen.append(metrics(server))
        return seen[-1] == seen[-2]

    eventually(still, within=30)
    return seen[-1]
