"""gRPC streams with `triton_grpc_error`, which Triton closes at an error, and crashes if other requests are on them."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest
import tritonclient.grpc
from tritonclient.grpc import service_pb2, service_pb2_grpc

from kvloom_client import Client, InvalidArgument, wire
from kvloom_client.request import build_request
from support.tiny_server import GREEDY, Tiny, tokens

STRICT = (("triton_grpc_error", "true"),)
STREAMS = 20


@pytest.fixture(scope="module")
def running(tmp_path_factory):
    tiny = Tiny(tmp_path_factory.mktemp("strict") / "model")
    with tiny.serve(max_running=64) as server:
        yield tiny, server


@pytest.fixture
def server(running):
    """The server, which is the same process and idle after the test, and answers rightly."""
    tiny, server = running
    before = server.process.pid
    with tiny.client(server):
        yield server
    assert server.process.poll() is None and server.process.pid == before


def good(number: int, model: str) -> dict[str, Any]:
    return {"input_ids": tokens(number, 8), "max_tokens": 100, "model": model, **GREEDY}


def bad(number: int, model: str) -> dict[str, Any]:
    """A request that the models refuse: before it is read, when it is parsed, or in admission."""
    kinds: list[dict[str, Any]] = [
        {"input_ids": [5, 6], "max_tokens": 0},
        {"input_ids": [5], "max_tokens": 4, "seed": -5},
        {"input_ids": [5], "sampling_parameters": {"min_token": 1}},
        {"input_ids": [5] * 5000},
        {"input_ids": [5], "max_tokens": 4, "sampling_parameters": {"top_p": "much"}},
    ]
    return {**kinds[number % len(kinds)], "model": model}


def message(identity: str, fields: dict[str, Any]) -> service_pb2.ModelInferRequest:
    return wire.encode_request(build_request(stream=True, request_id=identity, **fields))


def forged(identity: str, model: str) -> service_pb2.ModelInferRequest:
    """A request with a parameter that only kvloom's own models may use."""
    request = message(identity, {"input_ids": [5], "model": model})
    request.parameters["kvloom_secret"].string_param = "guessed"
    return request


def wrong_type(model: str) -> service_pb2.ModelInferRequest:
    """A request that does not reach the models."""
    request = message("wrong type", {"input_ids": [5], "model": model})
    request.inputs[0].datatype = "FP32"
    return request


def answers_of(address: str, requests: Iterator[service_pb2.ModelInferRequest]) -> dict[str, list[Any]]:
    """Every response of one strict stream by its request's id, as (finish_reason, text, token ids).

    What Triton itself refuses has neither id nor outputs; its errors are under the id "Triton".
    """
    answers: dict[str, list[Any]] = {}
    with grpc.insecure_channel(address, options=wire.CHANNEL_OPTIONS) as channel:
        stub = service_pb2_grpc.GRPCInferenceServiceStub(channel)
        for response in stub.ModelStreamInfer(requests, metadata=STRICT, timeout=120):
            if response.error_message:
                answers.setdefault("Triton", []).append(response.error_message)
                continue
            inferred = tritonclient.grpc.InferResult(response.infer_response)
            if response.infer_response.outputs:
                ids = inferred.as_numpy("token_ids")
                answers.setdefault(inferred.get_response().id, []).append(
                    (
                        inferred.as_numpy("finish_reason")[0, 0].decode(),
                        inferred.as_numpy("text_output")[0, 0].decode(),
                        [] if ids is None else ids.reshape(-1).tolist(),
                    )
                )
    return answers


@pytest.mark.parametrize("model", ["llm", "generate"])
def test_bad_requests_among_good_ones_end_nothing(server, model):
    with Client(server.grpc_url) as client:
        expected = [list(client.generate(**good(number, model)).token_ids) for number in range(STREAMS)]

    def one_stream(number: int) -> dict[str, list[Any]]:
        return answers_of(
            server.grpc_url,
            iter(
                [
                    message("bad first", bad(number, model)),
                    message("first", good(number, model)),
                    message("bad", bad(number + 1, model)),
                    forged("forged", model),
                    wrong_type(model),
                    message("second", good(number, model)),
                    message("bad last", bad(number + 2, model)),
                ]
            ),
        )

    with ThreadPoolExecutor(STREAMS) as pool:
        streams = list(pool.map(one_stream, range(STREAMS)))
    for number, answers in enumerate(streams):
        for name in ("first", "second"):
            assert answers[name][-1][0] == "length"
            assert [token for _, _, ids in answers[name] for token in ids] == expected[number]
        for name in ("bad first", "bad", "forged", "bad last"):
            [(reason, text, ids)] = answers[name]
            assert reason == "error" and text.startswith("INVALID_ARG: ") and ids == []
        [refused] = answers["Triton"]
        assert "data-type is 'FP32'" in refused


def test_the_client_raises_the_error(server):
    with Client(server.grpc_url, headers=dict(STRICT)) as client:
        with pytest.raises(InvalidArgument, match="INVALID_ARG: max_tokens: "):
            client.generate(input_ids=[5, 6], max_tokens=0)
        assert client.generate(**good(1, "llm")).finish_reason == "length"
