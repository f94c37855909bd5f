"""Random malformed requests: each gets an error that names what is wrong, or an answer; none hurts a neighbour."""

import json
import threading
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from http_door import post
from kvloom.request import SamplingParams
from kvloom.serving.fields import PROMPTS, RETURNED
from kvloom.serving.options import Options
from kvloom_client import Client
from server import assert_idle, canary

HEALTHY = {"text_input": "What is deep learning?", "temperature": 0.0, "max_tokens": 60, "ignore_eos": True}

KEYS = st.sampled_from([*SamplingParams.model_fields, "tempurature", "min_length", "random_seed", "stop_words"])
INPUTS = st.sampled_from(
    [*PROMPTS, *RETURNED, *Options.model_fields, "stream", "sampling_parameters", "kv", "id", "odd"]
)
SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.integers(-3, 30),
    st.floats(allow_nan=True, allow_infinity=True),
    st.text(max_size=12),
    st.sampled_from(["\ud83d", "\x00", "NaN", "1e400", "[]", '{"op": "ping"}', '{"op": "end"}']),
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
SAMPLING = st.one_of(
    st.dictionaries(KEYS, VALUES, max_size=4).map(json.dumps),
    st.text(max_size=20),
    st.sampled_from(["{", "[1]", "null", '{"a"', "[" * 3000, '{"temperature": 1, "temperature": NaN}']),
)


@st.composite
def bodies(draw) -> dict[str, Any]:
    """A request with a short prompt, most of the time, and a few things wrong or right with it."""
    body: dict[str, Any] = {}
    if draw(st.integers(0, 4)):
        body["text_input"] = draw(st.sampled_from(["Hello", "", " ", "天气", "<|im_start|>", "a" * 3000]))
    if draw(st.booleans()):
        body["sampling_parameters"] = draw(SAMPLING)
    body |= draw(st.dictionaries(st.one_of(KEYS, INPUTS), VALUES, max_size=3))
    # so that what is right by chance does not take long
    body.setdefault("deadline_ms", 300)
    return body


OURS = ("INVALID_ARG: ", "UNAVAILABLE: ", "NOT_FOUND: ")


def check(server, body: dict[str, Any], endpoint: str) -> None:
    text = json.dumps(body)
    status, reply = post(server, text, endpoint, timeout=30)
    assert "Traceback" not in reply
    found = json.loads(reply.removeprefix("data: ").split("\n\n")[0])
    if status != 200:
        error = found["error"]
        assert status in (400, 500)
        if error.startswith(OURS):
            assert error.count(": ") >= 2, "an error names the field and says what is wrong"
        else:
            # Triton's own words: they come from its parser, before the model sees anything
            assert not error.startswith("INTERNAL"), error
            assert "Error" not in error.split(":")[0], error
    else:
        assert "text_output" in found or "exactly 1 response" in found["error"], found


def storm(server, examples: int) -> None:
    with Client(server.grpc_url) as client:
        expected = client.generate(**HEALTHY).text
        stop, wrong = threading.Event(), []

        def healthy() -> None:
            while not stop.is_set():
                text = "".join(chunk.text for chunk in client.stream(**HEALTHY))
                if text != expected:
                    wrong.append(text)

        thread = threading.Thread(target=healthy)
        thread.start()

        @settings(
            max_examples=examples,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )
        @given(body=bodies(), endpoint=st.sampled_from(["generate", "generate_stream"]))
        def run(body: dict[str, Any], endpoint: str) -> None:
            check(server, body, endpoint)

        try:
            run()
        finally:
            stop.set()
            thread.join()
        assert not wrong
    canary(server)
    assert_idle(server)


def test_malformed_requests(server):
    storm(server, 200)


@pytest.mark.full
def test_malformed_requests_full(server):
    storm(server, 2000)
