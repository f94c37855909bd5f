"""Requests with every kind of end, and a check that they leak nothing."""

import random
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

from tokenizers import Tokenizer

from kvloom.launcher.launch import Server
from kvloom_client import Client, RequestFailed
from support.tiny_models import EOS
from support.tiny_server import Tiny, blocks, request, stub

ENDINGS = ("stop", "length", "eos", "error", "cancel", "disconnect", "deadline")


def end(tiny: Tiny, server: Server, client: Client, number: int) -> str:
    """Run one request that ends in one of these ways. Returns how it ended."""
    how = ENDINGS[number % len(ENDINGS)]
    rng = random.Random(number)
    asked = request(number, length=rng.randint(1, 150), max_tokens=rng.randint(1, 60))
    leaver = Client(server.grpc_url) if how == "disconnect" else client
    if how == "stop":
        letter = Tokenizer.from_file(str(tiny.folder / "tokenizer.json")).token_to_id("a")
        asked |= {"logit_bias": {str(letter): 100.0}, "stop": "aaa", "max_tokens": 40}
    elif how == "eos":
        asked |= {
            "logit_bias": {str(EOS): 100.0},
            "min_tokens": rng.randrange(9),
            "max_tokens": 40,
            "ignore_eos": False,
        }
    elif how == "error":
        asked |= {"request_id": f"test-fail-{number}", "max_tokens": 40}
    elif how in ("cancel", "disconnect", "deadline"):
        asked["max_tokens"] = 800
    if how == "deadline":
        asked["deadline_ms"] = rng.randint(1, 200)
    stream = leaver.stream(**asked, timeout=120)
    try:
        chunks = []
        for chunk in stream:
            chunks.append(chunk)
            if len(chunks) == 5 and how in ("cancel", "disconnect"):
                stream.cancel()
                if how == "disconnect":
                    leaver.close()
        return "left" if stream.cancelled else str(chunks[-1].finish_reason)
    except RequestFailed as error:
        assert error.text.startswith("INTERNAL: test_fail_after_tokens"), error.text
        return "error"


def nothing_is_left(tiny: Tiny, server: Server, count: int) -> None:
    """After a warm-up, run ``count`` requests and check that they leak no memory, blocks or threads."""
    llm, generate = stub(server), stub(server, "generate")
    with tiny.client(server) as client, ThreadPoolExecutor(16) as pool:

        def run(numbers: range) -> tuple[int, int, int]:
            ended = Counter(pool.map(lambda number: end(tiny, server, client, number), numbers))
            each = len(numbers) // len(ENDINGS)
            assert ended["stop"] >= 2 * each
            assert ended["left"] >= 2 * each
            assert ended["error"] >= each
            assert ended["deadline"] >= each * 0.8
            left = blocks(server)
            assert (left["used"], left["swapped"]) == (0, 0)
            return llm.memory_info().rss, llm.num_threads(), generate.num_threads()

        rss, *threads = run(range(70))
        rss_after, *threads_after = run(range(70, 70 + count))
        print(f"{rss / 2**20:.1f} MiB before, {rss_after / 2**20:.1f} MiB after {count} requests")
        assert threads_after == threads
        assert rss_after < rss * 1.05
