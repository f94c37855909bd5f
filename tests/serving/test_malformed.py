"""Random malformed requests: each gets an error that names what is wrong, or an answer; none hurts a neighbour."""

import json
import math
import queue
import threading
import uuid
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as triton
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom.request import SamplingParams
from kvloom.serving.interface import INPUTS, Part
from kvloom_client import Client
from support.http_door import post, refusal
from support.server import assert_idle, canary

HEALTHY = {"text_input": "What is deep learning?", "temperature": 0.0, "max_tokens": 60, "ignore_eos": True}

KEYS = st.sampled_from([*SamplingParams.model_fields, "tempurature", "min_length", "random_seed", "stop_words"])
OTHERS = st.sampled_from([*(own.name for own in INPUTS if own.part is not Part.SAMPLING), "id", "odd"])
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
    body |= draw(st.dictionaries(st.one_of(KEYS, OTHERS), VALUES, max_size=3))
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


# over gRPC nothing parses the numbers of a tensor: whatever its bits say reaches the model
NUMBERS = {
    "INT32": (np.int32, st.integers(-(2**31), 2**31 - 1) | st.integers(-3, 30)),
    "UINT64": (np.uint64, st.integers(0, 2**64 - 1)),
    "FP32": (np.float32, st.floats(width=32) | st.floats(-1, 3, width=32)),
    "BOOL": (np.bool_, st.booleans()),
    "BYTES": (np.object_, st.binary(max_size=12) | st.sampled_from([b"", b"\xff\xfe", b"{", b'{"op": "ping"}', b"[]"])),
}
DECLARED = {own.name: own.type.replace("STRING", "BYTES") for own in INPUTS}


@st.composite
def tensors(draw) -> dict[str, np.ndarray]:
    """Inputs of their declared types, mostly of their declared shapes."""
    found: dict[str, np.ndarray] = {}
    for name in draw(st.lists(st.sampled_from(sorted(DECLARED)), max_size=4, unique=True)):
        dtype, values = NUMBERS[DECLARED[name]]
        shape = draw(st.sampled_from([(1, 1)] * 8 + [(1, 2), (1, 0), (2, 1), (1,)]))
        found[name] = np.array(draw(st.lists(values, min_size=math.prod(shape), max_size=math.prod(shape))), dtype)
        found[name] = found[name].reshape(shape)
    if draw(st.integers(0, 4)):
        found.setdefault("text_input", np.array([[b"Hello"]], np.object_))
    found.setdefault("deadline_ms", np.array([[300]], np.int32))
    return found


def check_tensors(server, inputs: dict[str, np.ndarray], model: str) -> None:
    found: queue.Queue = queue.Queue()
    sequence = {"sequence_id": uuid.uuid4().hex, "sequence_start": True, "sequence_end": True} if model == "llm" else {}
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: found.put((result, error)))
        given = []
        for name, array in inputs.items():
            given.append(triton.InferInput(name, array.shape, DECLARED[name]))
            given[-1].set_data_from_numpy(array)
        client.async_stream_infer(model, given, **sequence)
        while True:
            result, error = found.get(timeout=30)
            if error is not None:
                text = error.message()
                assert "Traceback" not in text
                assert "INTERNAL: " not in text, text
                break
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
        client.stop_stream()


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

        often = settings(
            max_examples=examples // 2,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            database=None,
            derandomize=True,
        )

        @often
        @given(body=bodies(), endpoint=st.sampled_from(["generate", "generate_stream"]))
        def over_http(body: dict[str, Any], endpoint: str) -> None:
            check(server, body, endpoint)

        @often
        @given(inputs=tensors(), model=st.sampled_from(["generate", "llm"]))
        def over_grpc(inputs: dict[str, np.ndarray], model: str) -> None:
            check_tensors(server, inputs, model)

        try:
            over_http()
            over_grpc()
        finally:
            stop.set()
            thread.join()
        assert not wrong
    canary(server)
    assert_idle(server)


@pytest.mark.slow
def test_malformed_requests(server):
    storm(server, 200)


@pytest.mark.full
def test_malformed_requests_full(server):
    storm(server, 2000)


@pytest.mark.parametrize("endpoint", ["generate", "generate_stream"])
@pytest.mark.parametrize("shape", ["lists", "objects", "open lists"])
def test_deeply_nested_json_ends_nothing(server, shape, endpoint):
    depth = 10**6
    body = {
        "lists": lambda: '{"text_input": ' + "[" * depth + "]" * depth + "}",
        "objects": lambda: '{"a": ' * depth + "1" + "}" * depth,
        "open lists": lambda: '{"text_input": ' + "[" * depth,
    }[shape]()
    before = server.process.pid
    with Client(server.grpc_url) as client:
        neighbour = client.stream(**HEALTHY)
        first = next(neighbour).text
        assert refusal(server, body, endpoint)
        assert first + "".join(chunk.text for chunk in neighbour) == client.generate(**HEALTHY).text
    assert server.process.poll() is None and server.process.pid == before
    canary(server)
    assert_idle(server)
