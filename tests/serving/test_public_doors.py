"""Faults that users of such servers reported, against the real server: HTTP, templates, transport (H17-H40)."""

import http.client
import json
import socket
import time
from collections.abc import Iterator
from urllib.parse import urlsplit

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
from transformers import AutoTokenizer
from tritonclient.grpc import service_pb2_grpc

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client, wire
from kvloom_client.request import build_request
from support.http_door import answer, events, post, refusal
from support.server import SETTINGS, assert_idle, canary, metrics
from support.tiny_models import make_tiny

FAIL_AFTER = 5
TEXT = {"text_input": "The capital city of France is", "temperature": 0, "max_tokens": 8}
WHOLE = " Paris.\n\nThe United States has"


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Server]:
    settings = {**SETTINGS, "max_running": "1", "test_fail_after_tokens": str(FAIL_AFTER)}
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server:
        yield server


@pytest.fixture(autouse=True)
def _healthy(one_slot: Server) -> Iterator[None]:
    yield
    canary(one_slot)
    assert_idle(one_slot)


# H17


def send(server: Server, endpoint: str, **request) -> socket.socket:
    """Begin a request and return its connection."""
    address = urlsplit(server.http_url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port or 0)
    connection.request("POST", f"/v2/models/generate/{endpoint}", json.dumps(request))
    assert connection.sock is not None
    return connection.sock


LONG = {"text_input": "Count:", "max_tokens": 2000, "ignore_eos": True, "temperature": 0}


def test_h17_leaving_an_http_stream_ends_the_work(one_slot):
    sock = send(one_slot, "generate_stream", **LONG, stream=True)
    sock.recv(100)
    time.sleep(0.5)
    assert metrics(one_slot)["kvloom_requests_running"] == 1
    sock.close()
    assert_idle(one_slot, within=15)


def test_h17_a_deadline_ends_the_work_of_a_plain_http_call(one_slot):
    # nothing is written before the end, so Triton can't notice that the client left: model_repository/README.md says so
    sock = send(one_slot, "generate", **LONG, deadline_ms=1500)
    time.sleep(0.5)
    sock.close()
    begin = time.monotonic()
    assert post(one_slot, {"text_input": "Hello", "max_tokens": 1})[0] == 200
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize("model", ["llm", "generate"])
def test_h17_cancelling_a_grpc_stream_ends_the_work(one_slot, model):
    with Client(one_slot.grpc_url) as client:
        stream = client.stream(**LONG, model=model)
        next(stream)
        stream.cancel()
        assert_idle(one_slot, within=15)


# H27


def test_h27_generate_and_generate_stream(one_slot):
    echoed = TEXT["text_input"] + WHOLE
    assert answer(one_slot, **TEXT, stream=False)["text_output"] == echoed
    assert answer(one_slot, **TEXT)["text_output"] == echoed
    status, text = post(one_slot, {**TEXT, "stream": True})
    assert status == 200
    assert "exactly 1 response" in text, "Triton's own answer"
    deltas = [event["text_output"] for event in events(one_slot, **TEXT, stream=True)]
    assert len(deltas) > 1
    assert "".join(deltas) == WHOLE
    for one_event in (events(one_slot, **TEXT), events(one_slot, **TEXT, stream=False)):
        assert [event["text_output"] for event in one_event] == [echoed]
    infer = {"inputs": [{"name": "text_input", "shape": [1, 1], "datatype": "BYTES", "data": ["a"]}]}
    status, text = post(one_slot, infer, "infer")
    assert status == 501
    assert "decoupled" in text


# H32


def test_h32_a_templates_complaint_reaches_the_client(tmp_path):
    folder = make_tiny(tmp_path / "model")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}"
        "{% elif (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate user/assistant') }}{% endif %}{{ m.content }}{% endfor %}"
    )
    tokenizer.save_pretrained(folder)
    settings = {"model": str(folder), "weights": "fp32", "kv_blocks": "64", "threads": "1"}

    def chat(*roles: str) -> str:
        return json.dumps([{"role": role, "content": "Hi"} for role in roles])

    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server:
        for roles, complaint in [
            (("system", "user"), "System role not supported"),
            (("system",), "System role not supported"),
            (("user", "user"), "must alternate"),
            (("assistant",), "must alternate"),
            (("tool",), "must alternate"),
            (("foo",), "must alternate"),
        ]:
            error = refusal(server, {"messages": chat(*roles), "max_tokens": 1})
            assert error.startswith("INVALID_ARG: messages: ")
            assert complaint in error
        assert post(server, {"messages": chat("user"), "max_tokens": 1})[0] == 200
        assert_idle(server)


# H33


@pytest.mark.parametrize("stream", [False, True])
def test_h33_escapes_and_large_texts(one_slot, stream):
    def bodies(content: str) -> list[str]:
        rest = f'"max_tokens": 2, "stream": {json.dumps(stream)}'
        chat = json.dumps(f'[{{"role": "user", "content": {content}}}]')
        return [f'{{"text_input": {content}, {rest}}}', f'{{"messages": {chat}, {rest}}}']

    endpoint = "generate_stream" if stream else "generate"
    for lone in (r'"emoji \ud83d"', r'"x \ude00 y"'):
        for body in bodies(lone):
            assert refusal(one_slot, body, endpoint)
    for fine in (r'"nul \u0000"', r'"ok \ud83d\ude00"'):
        for body in bodies(fine):
            status, text = post(one_slot, body, endpoint)
            assert status == 200
            assert "error" not in text
    # a megabyte of text is more tokens than the context holds
    assert "INVALID_ARG: prompt: " in refusal(one_slot, json.dumps({"text_input": "天气" * 170_000}), endpoint)


# H34


def test_h34_an_error_before_the_first_byte_has_its_status_and_ends_the_call(one_slot):
    status, text = post(one_slot, {**TEXT, "n": 0, "stream": True}, "generate_stream", timeout=30)
    assert status == 400
    assert json.loads(text.removeprefix("data: "))["error"].startswith("INVALID_ARG: n: ")


def test_h34_an_error_after_some_tokens_ends_the_stream(one_slot):
    body = {**LONG, "stream": True, "id": "test-fail-http", "stream_interval_ms": 0, "return_finish_reason": True}
    status, text = post(one_slot, body, "generate_stream", timeout=30)
    assert status == 200
    *before, last = [json.loads(line.removeprefix("data: ")) for line in text.splitlines() if line]
    assert before
    assert all(event["finish_reason"] == "" for event in before)
    assert last["error"].startswith("INTERNAL: ")


# H40


def infer(server: Server, array: np.ndarray) -> str:
    """The answer to a prompt sent by Triton's own client; raises what it raises."""
    tensor = triton.InferInput("text_input", array.shape, "BYTES")
    tensor.set_data_from_numpy(array)
    # where inputs differ in their batch dimension, Triton refuses them before the model sees any
    batch = array.shape[0] if array.ndim == 2 else 1
    length = triton.InferInput("max_tokens", [batch, 1], "INT32")
    length.set_data_from_numpy(np.ones((batch, 1), dtype=np.int32))
    cold = triton.InferInput("temperature", [batch, 1], "FP32")
    cold.set_data_from_numpy(np.zeros((batch, 1), dtype=np.float32))
    found: list = []
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(lambda result, error: found.append((result, error)))
        client.async_stream_infer("generate", [tensor, length, cold])
        client.stop_stream()
    [(result, error)] = found
    if error is not None:
        raise error
    return result.as_numpy("text_output")[0, 0].decode()


PROMPT = "The capital city of France is"


def test_h40_str_and_bytes_are_alike(one_slot):
    for array in (np.array([[PROMPT]], dtype=np.object_), np.array([[PROMPT.encode()]], dtype=np.object_)):
        assert infer(one_slot, array) == f"{PROMPT} Paris"
    assert infer(one_slot, np.array([[PROMPT.encode()]])) == f"{PROMPT} Paris"
    assert infer(one_slot, np.array([["ends in NUL\0"]], dtype=np.object_)).startswith("ends in NUL\0")


@pytest.mark.parametrize("shape", [(1,), (2, 1), (1, 2)])
def test_h40_other_shapes_are_refused_with_the_right_one(one_slot, shape):
    with pytest.raises(triton.InferenceServerException, match=r"\[(1|-1),\s?1\]"):
        infer(one_slot, np.full(shape, PROMPT, dtype=np.object_))


def test_h40_invalid_utf8_is_refused(one_slot):
    with pytest.raises(triton.InferenceServerException, match="INVALID_ARG: text_input: is not UTF-8"):
        infer(one_slot, np.array([[b"\xff\xfe"]], dtype=np.object_))


def test_h40_json_lists(one_slot):
    rest = {"max_tokens": 1, "temperature": 0}
    # Triton itself takes nested lists for what they hold
    for prompt in (PROMPT, [PROMPT], [[PROMPT]]):
        assert answer(one_slot, text_input=prompt, **rest)["text_output"] == f"{PROMPT} Paris"
    assert refusal(one_slot, {"text_input": [PROMPT, PROMPT], **rest})


@pytest.mark.parametrize("value", [0.5, 5, True, "5"])
def test_h40_a_parameter_of_any_type_is_refused_by_its_name(one_slot, value):
    status, text = post(one_slot, {**TEXT, "foo": value})
    assert status == 400
    assert "INVALID_ARG: foo: unknown key" in text


def test_k12_a_client_may_ping_while_it_waits(one_slot):
    """By gRPC's default, a server ends the connection at the third ping without data in five minutes."""
    often = (
        ("grpc.keepalive_time_ms", 50),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    request = wire.encode_request(
        build_request(stream=False, text_input="Count:", max_tokens=100, ignore_eos=True, temperature=0.0)
    )
    with grpc.insecure_channel(one_slot.grpc_url, options=often) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        began = time.monotonic()
        # long enough for the pings that would be too many
        while time.monotonic() - began < 2:
            [message] = stub.ModelStreamInfer(iter((request,)), timeout=100)
            assert not message.error_message
