"""Faults that users of such servers reported, against the real server: text, stop strings, neighbours (H01-H12)."""

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom.models.fetch import default_model
from kvloom.models.weights import open_model
from kvloom.text.tokenizer import Tokenizer
from kvloom_client import Client
from support.server import REFERENCE, assert_idle, canary

ALPHABET = "Here is the English alphabet: ABC"


@pytest.fixture(autouse=True)
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


@pytest.fixture(scope="module")
def decode():
    """One whole decode of token ids."""
    return Tokenizer.from_gguf(open_model(default_model()).metadata).decode


def streamed(client: Client, **request):
    """(deltas, token ids, finish reason) of a streamed answer."""
    chunks = list(client.stream(**request, timeout=300))
    return [chunk.text for chunk in chunks], [t for chunk in chunks for t in chunk.token_ids], chunks[-1].finish_reason


def check_h01(client: Client, decode, request: dict) -> None:
    deltas, ids, _ = streamed(client, **request)
    whole = client.generate(**request, timeout=300)
    assert list(whole.token_ids) == ids, "a seeded request gave other tokens the second time"
    assert "".join(deltas) == whole.text == decode(ids)
    spoilt = decode(ids).count("\ufffd")
    assert sum(delta.count("\ufffd") for delta in deltas) == spoilt


def random_texts(client: Client, decode, seeds: int) -> None:
    def one(seed: int) -> None:
        sampling = {"temperature": 1.5, "seed": seed, "max_tokens": 64, "ignore_eos": True}
        check_h01(client, decode, {"text_input": "Once upon a time", **sampling})

    with ThreadPoolExecutor(16) as pool:
        list(pool.map(one, range(seeds)))


def test_h01_random_text_streams_whole_characters(client, decode):
    random_texts(client, decode, 12)


@pytest.mark.full
def test_h01_random_text_streams_whole_characters_full(client, decode):
    random_texts(client, decode, 200)


def test_h01_characters_of_several_tokens(client, decode):
    [reference] = [entry for entry in REFERENCE if entry["name"] == "unicode"]
    request = {"text_input": reference["prompt"], "temperature": 0.0, "max_tokens": 64, "ignore_eos": True}
    check_h01(client, decode, request)
    # an answer cut in the middle of a character, at every length
    with ThreadPoolExecutor(16) as pool:
        list(pool.map(lambda length: check_h01(client, decode, {**request, "max_tokens": length}), range(1, 12)))


def test_h03_no_part_of_a_stop_string_is_sent(client):
    request = {"text_input": ALPHABET, "temperature": 0.0, "max_tokens": 32}
    text = client.generate(**request, timeout=60).text

    def check(stop: str) -> None:
        assert stop in text
        deltas, ids, reason = streamed(client, **request, stop=stop)
        assert "".join(deltas) == text[: text.index(stop)]
        assert reason == "stop"
        assert len(ids) < 32, "generation went on after the stop string"
        assert client.generate(**request, stop=stop, timeout=60).text == "".join(deltas)

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(check, ["DEFGHIJ", "XYZ\n\nNow", "QRSTUVWXYZ\n\nNow, let"]))


def check_stops(client: Client, request: dict, text: str, stops: list[str]) -> None:
    """Each stop string ends the answer ``text`` at its first occurrence."""

    def check(stop: str) -> None:
        answer = client.generate(**request, stop=[stop, "never in the text"], timeout=60)
        assert (answer.text, answer.finish_reason) == (text[: text.index(stop)], "stop")
        kept = client.generate(**request, stop=stop, include_stop_str_in_output=True, timeout=60)
        assert kept.text == text[: text.index(stop) + len(stop)]
        assert "".join(streamed(client, **request, stop=stop)[0]) == answer.text

    with ThreadPoolExecutor(len(stops)) as pool:
        list(pool.map(check, stops))


@pytest.mark.parametrize(
    ("prompt", "stops"), [("The capital city of France is", ["Par", "Pari", "aris"]), (ALPHABET, ["DE", "EF", "GHI"])]
)
def test_h04_stop_string_inside_a_token(client, prompt, stops):
    request = {"text_input": prompt, "temperature": 0.0, "max_tokens": 12}
    text = client.generate(**request, timeout=60).text
    assert all(stop in text for stop in stops)
    check_stops(client, request, text, stops)


def test_h04_three_characters_of_any_token(client, decode):
    request = {"text_input": "What is deep learning?", "temperature": 0.0, "max_tokens": 24}
    answer = client.generate(**request, timeout=60)
    long_tokens = [piece for piece in map(decode, ([token] for token in answer.token_ids)) if len(piece) >= 5]
    assert len(long_tokens) > 5
    check_stops(client, request, answer.text, [piece[1:4] for piece in long_tokens[:6]])


def one_text(client: Client, max_tokens: int) -> None:
    request = {"text_input": "What is deep learning?", "temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True}

    def ask(delay_s: float = 0.0) -> str:
        time.sleep(delay_s)
        return client.generate(**request, timeout=300).text

    def neighbour(number: int) -> str:
        prompt = {"input_ids": list(range(100 + number, 100 + number + 11 * number))}
        return client.generate(**{**request, **prompt, "text_input": None}, timeout=300).text

    texts = {ask()}
    with ThreadPoolExecutor(16) as pool:
        texts |= set(pool.map(ask, [0.0] * 8))
        others = [pool.submit(neighbour, number) for number in range(1, 9)]
        texts |= set(pool.map(ask, [0.0] * 8))
        [other.result() for other in others]
        texts |= set(pool.map(ask, [0.05 * number for number in range(8)]))
    assert len(texts) == 1


def test_h12_one_text_whatever_runs_beside_it(client):
    one_text(client, 24)


@pytest.mark.full
def test_h12_one_text_whatever_runs_beside_it_full(client):
    one_text(client, 128)
