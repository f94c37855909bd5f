"""Faults that users of such servers reported, against real servers: prefix cache, blocks, gauges (H13-H20, H37)."""

import itertools
import random
import string
import threading
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client, InvalidArgument, RequestFailed
from support.server import SETTINGS, assert_idle, canary, metrics
from support.tiny_models import EOS
from support.tiny_server import BLOCK, GREEDY, Tiny, ask, blocks, found, tokens

POOL = 1024
FAIL_AFTER = 5


@pytest.fixture(scope="module")
def caching(tiny) -> Iterator[Server]:
    """A server with a prefix cache that takes whole prompts in a step."""
    with tiny.serve(kv_blocks=POOL, max_batch_tokens=4096, test_fail_after_tokens=FAIL_AFTER) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tiny) -> Iterator[Server]:
    """A server without a prefix cache, for what answers should be."""
    with tiny.serve(kv_blocks=POOL, prefix_cache="false", test_fail_after_tokens=FAIL_AFTER) as server:
        yield server


def ids(answers: list) -> list[tuple[int, ...]]:
    return [answer.token_ids for answer in answers]


def findable(prompt_tokens: int) -> int:
    """How many tokens of a known prompt are found: full blocks, and the last token is always computed."""
    return (prompt_tokens - 1) // BLOCK * BLOCK


# H13


def same_twice(caching: Client, plain: Client, requests: list[dict[str, Any]]) -> None:
    """Two passes on each server: all four give the same, and the caching server's second one finds its prompts."""
    expected = ask(plain, requests)
    again = ask(plain, requests)
    cold, warm = ask(caching, requests), ask(caching, requests)
    assert ids(again) == ids(cold) == ids(warm) == ids(expected)
    assert sum(map(found, expected + again)) == 0
    assert [found(answer) for answer in warm] == [findable(answer.num_input_tokens) for answer in warm]


def random_texts() -> list[dict[str, Any]]:
    rng = random.Random(13)
    texts = ["".join(rng.choices(string.ascii_lowercase + string.digits, k=512)) for _ in range(16)]
    return [{"text_input": text, "max_tokens": 64, **GREEDY} for text in texts]


def questions(words: int, count: int = 16) -> list[dict[str, Any]]:
    rng = random.Random(14)
    system = " ".join(rng.choices(["cache", "letter", "dog", "fox", "place", "needed"], k=words))
    chats = [
        [{"role": "system", "content": system}, {"role": "user", "content": f"What is number {number}?"}]
        for number in range(count)
    ]
    return [{"messages": chat, "max_tokens": 64, **GREEDY} for chat in chats]


def shared_system_text(caching: Client, plain: Client, words: int) -> None:
    requests = questions(words)
    expected = ask(plain, requests)
    assert min(answer.num_input_tokens for answer in expected) > 1000
    first = ask(caching, requests[:1])
    others = ask(caching, requests[1:])
    assert ids(first + others) == ids(expected)
    assert found(first[0]) < 100
    assert min(map(found, others)) >= 1000 // BLOCK * BLOCK, "the shared text was computed again"


def test_h13_a_second_pass_gives_the_same(tiny, caching, plain):
    with tiny.client(caching) as warm, tiny.client(plain) as cold:
        same_twice(warm, cold, random_texts())
        shared_system_text(warm, cold, words=1000)


@pytest.mark.full
def test_h13_a_second_pass_gives_the_same_full():
    settings = {**SETTINGS, "kv_blocks": str(POOL), "threads": "1"}
    with (
        Server.start(ModelRepository(settings), exit_timeout_s=5) as caching,
        Server.start(ModelRepository({**settings, "prefix_cache": "false"}), exit_timeout_s=5) as plain,
        Client(caching.grpc_url) as warm,
        Client(plain.grpc_url) as cold,
    ):
        same_twice(warm, cold, random_texts())
        shared_system_text(warm, cold, words=1050)
        for server in (caching, plain):
            canary(server)
            assert_idle(server)


# H14


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK - 1, 2 * BLOCK, 2 * BLOCK + 1])
def test_h14_prompts_around_the_block_size(tiny, caching, plain, length):
    alone, together = (
        {"input_ids": tokens(seed + length, length), "max_tokens": 24, **GREEDY} for seed in (1400, 1450)
    )
    with tiny.client(caching) as warm, tiny.client(plain) as cold:
        [expected, expected_together] = ids(ask(cold, [alone, together], at_once=1))
        answers = ask(warm, [alone] * 3, at_once=1)
        assert ids(answers) == [expected] * 3
        assert [found(answer) for answer in answers] == [0, findable(length), findable(length)]
        for _ in range(3):
            answers = ask(warm, [together] * 4, at_once=4)
            assert ids(answers) == [expected_together] * 4
            assert max(map(found, answers)) <= findable(length)
        assert [found(answer) for answer in answers] == [findable(length)] * 4


# H15


@pytest.mark.parametrize("weak", ["constant", pytest.param("mod7", marks=pytest.mark.full)])
def test_h15_a_weak_hash_serves_nobody_elses_cache(tiny, plain, weak):
    rng = random.Random(15)
    prompts = [tokens(1500 + number, rng.randint(20, 120)) for number in range(20)]
    requests = [{"input_ids": prompt, "max_tokens": 16, **GREEDY} for prompt in prompts]
    second = tokens(1590, BLOCK + 5)
    after = [{"input_ids": tokens(1591 + n, BLOCK) + second, "max_tokens": 16, **GREEDY} for n in range(2)]
    with tiny.serve(test_block_hash=weak) as server, tiny.client(server) as colliding, tiny.client(plain) as cold:
        expected = ids(ask(cold, requests))
        assert ids(ask(colliding, requests)) == expected
        again = ask(colliding, requests)
        assert ids(again) == expected
        assert [found(answer) for answer in again] == [findable(len(prompt)) for prompt in prompts]
        answers = ask(colliding, after, at_once=1)
        assert ids(answers) == ids(ask(cold, after))
        assert [found(answer) for answer in answers] == [0, 0], "a block was found behind another block"


# H16

ENDINGS = ("stop", "length", "eos", "error", "cancel")


def ending(tiny: Tiny, how: str, number: int) -> dict[str, Any]:
    """A request that ends in this way after a few tokens."""
    request: dict[str, Any] = {"input_ids": tokens(number, number % 70 + 1), "max_tokens": 40, "temperature": 0.0}
    if how == "stop":
        letter = Tokenizer.from_file(str(tiny.folder / "tokenizer.json")).token_to_id("a")
        return {**request, "logit_bias": {str(letter): 100.0}, "stop": "a" * (number % 9 + 1)}
    if how == "eos":
        return {**request, "logit_bias": {str(EOS): 100.0}, "min_tokens": number % 9}
    request["ignore_eos"] = True
    if how == "error":
        return {**request, "request_id": f"test-fail-{number}"}
    return {**request, "max_tokens": 2000} if how == "cancel" else request


def end_all(tiny: Tiny, client: Client, numbers: range) -> Counter[str]:
    """Requests of every ending, eight at once; how they ended."""

    def one(number: int) -> str:
        how = ENDINGS[number % len(ENDINGS)]
        stream = client.stream(**ending(tiny, how, number), timeout=120)
        chunks = []
        try:
            for chunk in stream:
                chunks.append(chunk)
                if how == "cancel" and len(chunks) == number % 7 + 1:
                    stream.cancel()
        except RequestFailed as error:
            assert error.text == f"INTERNAL: test_fail_after_tokens={FAIL_AFTER}"
            return "error"
        return "cancelled" if stream.cancelled else str(chunks[-1].finish_reason)

    with ThreadPoolExecutor(8) as pool:
        return Counter(pool.map(one, numbers))


@pytest.mark.parametrize("cache", ["caching", "plain"])
def test_h16_every_block_comes_back(tiny, request, cache):
    server = request.getfixturevalue(cache)
    with tiny.client(server) as client:
        for numbers in (range(120), range(120, 144), range(144, 168)):
            each = len(numbers) / len(ENDINGS)
            ended = end_all(tiny, client, numbers)
            assert ended["stop"] >= 2 * each - 2, "stop strings and end tokens"
            assert min(ended[how] for how in ("length", "error", "cancelled")) >= int(each)
            left = blocks(server)
            assert (left["used"], left["swapped"]) == (0, 0)
            assert left["free"] + left["cached"] == POOL
            assert (left["cached"] > 0) == (cache == "caching")
        assert client.control("flush")["blocks"] == left["cached"]
        assert blocks(server) == {"free": POOL, "used": 0, "cached": 0, "swapped": 0}


# H18


def test_h18_what_the_pool_can_never_hold(tiny, plain):
    short = [{"input_ids": tokens(1810 + number, 20), "max_tokens": 20, **GREEDY} for number in range(5)]
    with (
        tiny.client(plain) as roomy,
        tiny.serve(kv_blocks=32, context_length=4096) as server,
        tiny.client(server) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        expected = ids(ask(roomy, short))
        with pytest.raises(
            InvalidArgument, match=r"INVALID_ARG: prompt: has 1000 tokens; the whole KV cache holds 512"
        ):
            client.generate(input_ids=tokens(1800, 1000), max_tokens=1)
        assert ids(ask(client, short)) == expected

        outgrowing = {"input_ids": tokens(1801, 300), "max_tokens": 1000, **GREEDY}
        long = pool.submit(lambda: ask(client, [outgrowing])[0])
        assert ids(ask(client, short)) == expected
        # the last token's keys and values are never needed: it has no place in the pool
        assert (long.result().finish_reason, long.result().num_output_tokens) == ("length", 32 * BLOCK + 1 - 300)
        assert long.result().token_ids == ask(roomy, [outgrowing])[0].token_ids[: 32 * BLOCK + 1 - 300]


# H19


@pytest.mark.parametrize("mode", ["recompute", "swap"])
@pytest.mark.slow
def test_h19_nothing_is_lost_by_preemption(tiny, plain, mode):
    requests = [{"input_ids": tokens(1900 + number, 100), "max_tokens": 1000, **GREEDY} for number in range(8)]
    half = 8 * 1100 // BLOCK // 2
    settings = {"kv_blocks": half, "swap_memory": "0" if mode == "recompute" else "64MiB"}
    with tiny.client(plain) as roomy, tiny.serve(**settings) as server, tiny.client(server) as client:
        expected = ask(roomy, requests, at_once=1)
        # sent before any is read: threads that begin one by one could let the first be done before the last begins
        sent = [client.stream(**one, return_usage=True, timeout=120) for one in requests]
        with ThreadPoolExecutor(8) as pool:
            streams = list(pool.map(list, sent))
        for chunks, alone in zip(streams, expected, strict=True):
            assert tuple(itertools.chain.from_iterable(chunk.token_ids for chunk in chunks)) == alone.token_ids
            assert "".join(chunk.text for chunk in chunks) == alone.text
            assert len(alone.token_ids) == chunks[-1].usage["generated_tokens"] == 1000
            same = ("prompt_tokens", "cached_tokens", "generated_tokens", "kv_dtype", "kv_policy", "evicted_blocks")
            assert [chunks[-1].usage[key] for key in same] == [alone.usage[key] for key in same]
        assert_idle(server)
        preempted = sum(chunks[-1].usage["preemptions"] for chunks in streams)
        assert preempted > 0
        assert metrics(server)[f'kvloom_preemptions_total{{mode="{mode}"}}'] == preempted
        assert blocks(server)["swapped"] == 0


# H20


@pytest.mark.parametrize(
    "chunk", [64, *(pytest.param(chunk, marks=pytest.mark.full) for chunk in (1, 63, 65))], ids=lambda n: f"chunk{n}"
)
def test_h20_chunks_change_nothing(tiny, caching, chunk):
    long = {"input_ids": tokens(2000, 1000), "max_tokens": 16, "logprobs": 3, "return_logprobs": True, **GREEDY}
    beside = {"input_ids": tokens(2001, 20), "max_tokens": 3000, **GREEDY}
    with tiny.client(caching) as whole, tiny.serve(max_batch_tokens=chunk) as server, tiny.client(server) as client:
        [expected] = ask(whole, [{**long, "cache_salt": f"chunk {chunk}"}])
        if chunk == 1:  # a step of one token has room for one sequence
            chunks, arrivals = list(client.stream(**long)), []
        else:
            # a prefill takes some milliseconds, and so may a client's thread until it runs: the best of some tries
            for attempt in range(8):
                chunks, arrivals = prefill_beside(client, {**long, "cache_salt": str(attempt)}, beside)
                if len(arrivals) >= 1000 // chunk - 4:
                    break
            else:
                raise AssertionError("the other stream stood still during every prefill")
        assert [len(chunk.token_ids) for chunk in chunks] == [1] * 16
        assert tuple(chunk.token_ids[0] for chunk in chunks) == expected.token_ids
        assert "".join(chunk.text for chunk in chunks) == expected.text
        for got, wanted in zip((chunk.logprobs[0] for chunk in chunks), expected.logprobs, strict=True):
            assert got["logprob"] == pytest.approx(wanted["logprob"], abs=1e-4)
            assert [top["id"] for top in got["top"]] == [top["id"] for top in wanted["top"]]
            assert [top["logprob"] for top in got["top"]] == pytest.approx(
                [top["logprob"] for top in wanted["top"]], abs=1e-4
            )


def prefill_beside(client: Client, long: dict, beside: dict) -> tuple[list, list[float]]:
    """The chunks of ``long``, and when those of ``beside`` came between its sending and its first token."""
    times: list[float] = []
    other = client.stream(**beside)
    next(other)

    def follow() -> None:
        times.extend(time.monotonic() for _ in other)

    follower = threading.Thread(target=follow)
    follower.start()
    sent = time.monotonic()
    stream = client.stream(**long)
    first = next(stream)
    answered = time.monotonic()
    chunks = [first, *stream]
    other.cancel()
    follower.join()
    return chunks, [when for when in times if sent < when < answered]


# H37


def cut_streams(server: Server) -> None:
    """Twenty long streams whose client goes away in one moment."""
    leaver = Client(server.grpc_url)
    streams = [leaver.stream(input_ids=tokens(3700 + n, 50), max_tokens=3000, **GREEDY) for n in range(20)]
    with ThreadPoolExecutor(20) as pool:
        list(pool.map(next, streams))
    time.sleep(0.5)
    seen = metrics(server)
    # on a busy machine the first ones have ended by now
    assert seen["kvloom_requests_running"] > 0
    assert seen['kvloom_blocks{state="used"}'] >= seen["kvloom_requests_running"] * 4
    leaver.close()


def test_h37_gauges_return_after_all_clients_left(tiny, caching):
    with tiny.client(caching):
        cut_streams(caching)
        # no request comes that could wake the engine
        assert_idle(caching)
        left = blocks(caching)
        assert left["free"] + left["cached"] == POOL


@pytest.mark.full
def test_h37_gauges_stay_after_all_clients_left_full(tiny, caching):
    with tiny.client(caching):
        cut_streams(caching)
        assert_idle(caching)
        time.sleep(25)
        assert blocks(caching)["used"] == 0
