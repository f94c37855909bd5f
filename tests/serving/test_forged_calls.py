"""Request parameters by which kvloom's models know each other's calls: a client that uses them is refused."""

import json
import threading

import numpy as np
import pytest
import tritonclient.grpc as triton

from kvloom.launcher.launch import Server
from support.http_door import post
from support.server import assert_idle, canary


@pytest.mark.parametrize("name", ["kvloom_forwarded", "kvloom_link", "kvloom_secret"])
@pytest.mark.parametrize("value", ["{}", "not json", '{"temperature": 3}', "", True, 7, 0.5])
def test_forged_calls_between_models_are_refused(server, name, value):
    refusal = f"INVALID_ARG: {name}: is reserved for calls between the server's models; leave it out"
    status, text = post(server, {"text_input": "Hello", "max_tokens": 1, name: value})
    assert (status, json.loads(text)) == (400, {"error": refusal})
    for model in ("llm", "generate"):
        for inputs in ({"text_input": "Hello"}, {"control": '{"op": "ping"}'}):
            assert grpc_refusal(server, model, inputs, {name: value}) == refusal


def test_a_forged_self_call_does_not_change_a_conversation(server, client):
    with client.conversation("forged") as talk:
        talk.generate(text_input="Hello", max_tokens=4, temperature=0.0)
        before = talk.status()
        forged: list[dict[str, object]] = [{"kvloom_link": ""}, {"kvloom_link": "", "kvloom_secret": "guess"}]
        for parameters in forged:
            text = grpc_refusal(server, "llm", {"control": '{"op": "ping"}'}, parameters, sequence_id="forged")
            assert text.startswith("INVALID_ARG: kvloom_link: ")
        after = talk.status()
        assert (after["tokens"], after["busy"]) == (before["tokens"], False)
    canary(server)
    assert_idle(server)


def grpc_refusal(
    server: Server, model: str, inputs: dict[str, str], parameters: dict[str, object], sequence_id: str = ""
) -> str:
    """The error of a request with parameters of its own."""
    heard: list[object] = []
    came = threading.Event()

    def take(result: object, error: object) -> None:
        heard.append(error)
        came.set()

    tensors = []
    for name, text in inputs.items():
        tensors.append(triton.InferInput(name, [1, 1], "BYTES"))
        tensors[-1].set_data_from_numpy(np.array([[text.encode()]], dtype=object))
    more: dict[str, object] = {}
    if model == "llm":
        # a turn of a conversation that is there, or one that is one turn long
        own = not sequence_id
        more = {"sequence_id": sequence_id or "forger", "sequence_start": own, "sequence_end": own}
    with triton.InferenceServerClient(server.grpc_url) as client:
        client.start_stream(take)
        client.async_stream_infer(model, tensors, parameters=parameters, **more)
        assert came.wait(30)
        client.stop_stream()
    assert heard[0] is not None
    return heard[0].message()
