"""Faults that users of such servers reported, against real servers: endings, cancels, model files, BOS (H17-H31)."""

import time
import uuid
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from tokenizers import processors
from transformers import AutoTokenizer, PreTrainedTokenizerFast
from tritonclient.grpc import service_pb2_grpc

from kvloom.errors import LaunchError, ModelError
from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client, wire
from kvloom_client.request import build_request
from support.server import REFERENCE, SETTINGS, assert_idle, canary, metrics
from support.tiny_models import edit_tensors, make_tiny, to_gguf
from support.tiny_server import serve_folder

FAIL_AFTER = 5


@pytest.fixture(scope="module")
def one_slot() -> Iterator[Server]:
    """A server that runs one request at a time, and fails those that ask for it."""
    settings = {**SETTINGS, "max_running": "1", "test_fail_after_tokens": str(FAIL_AFTER)}
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server:
        yield server


@pytest.fixture
def healthy(one_slot: Server) -> Iterator[None]:
    yield
    canary(one_slot)
    assert_idle(one_slot)


# H17


@pytest.mark.parametrize("leave", ["cancel", "close the connection"])
def test_h17_work_ends_when_the_client_leaves(one_slot, healthy, leave):
    request = {"text_input": "Count:", "max_tokens": 2000, "ignore_eos": True, "temperature": 0.0}
    leaver = Client(one_slot.grpc_url)
    stream = leaver.stream(**request)
    assert next(stream).token_ids
    with Client(one_slot.grpc_url) as other:
        waiting = other.stream(text_input="Hello", max_tokens=1)
        time.sleep(0.5)
        assert metrics(one_slot)["kvloom_requests_running"] == 1
        assert metrics(one_slot)["kvloom_requests_waiting"] == 1
        if leave == "cancel":
            stream.cancel()
        else:
            leaver.close()
        left = time.monotonic()
        assert len(list(waiting)) == 1, "the one slot was not given on"
        assert time.monotonic() - left < 20
    leaver.close()
    assert_idle(one_slot)


def test_h17_a_waiting_request_can_leave_too(one_slot, healthy):
    with Client(one_slot.grpc_url) as client:
        running = client.stream(text_input="Count:", max_tokens=2000, ignore_eos=True)
        next(running)
        waiting = client.stream(text_input="Hello", max_tokens=1)
        time.sleep(0.5)
        waiting.cancel()
        time.sleep(0.7)
        seen = metrics(one_slot)
        assert (seen["kvloom_requests_running"], seen["kvloom_requests_waiting"]) == (1, 0)
        running.cancel()


# H26


def raw_stream(server: Server, empty_final: bool, request: dict, cancel_after: int | None = None) -> list:
    """Every message of one request's stream, or the gRPC status it ended with, last."""
    message = wire.encode_request(build_request(stream=True, **request))
    message.parameters["triton_enable_empty_final_response"].bool_param = empty_final
    received: list = []
    with grpc.insecure_channel(server.grpc_url) as channel:
        call = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter((message,)), timeout=60)
        try:
            for response in call:
                received.append(response)
                if cancel_after is not None and len(received) == cancel_after:
                    call.cancel()
        except grpc.RpcError as error:
            received.append(error.code())
    return received


def to_the_end() -> list[int]:
    """A chat whose next token is the end of the answer: the answer is empty."""
    [reference] = [entry for entry in REFERENCE if entry["name"] == "chat-france"]
    return reference["prompt_ids"] + reference["ids"][: reference["ids"].index(2)]


ENDINGS = {
    "normal": ({"text_input": "Hello", "max_tokens": 4, "ignore_eos": True}, 4),
    "no text at all": ({"input_ids": to_the_end(), "temperature": 0.0}, 1),
    "one token": ({"text_input": "Hello", "max_tokens": 1}, 1),
    "stop at the first token": ({"text_input": "The capital city of France is", "temperature": 0.0, "stop": " P"}, 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_h26_the_last_response_carries_the_final_mark(one_slot, healthy, ending):
    request, responses = ENDINGS[ending]
    for empty_final in (False, True):
        received = raw_stream(one_slot, empty_final, request)
        assert len(received) == responses, "one response per token, none of them empty"
        assert not any(response.error_message for response in received)
        marks = [response.infer_response.parameters["triton_final_response"].bool_param for response in received]
        assert marks == [False] * (responses - 1) + [True]


@pytest.mark.parametrize("empty_final", [False, True])
def test_h26_an_error_after_some_tokens_ends_the_stream(one_slot, healthy, empty_final):
    request = {"text_input": "Hello", "request_id": f"test-fail-{uuid.uuid4().hex}", "ignore_eos": True}
    received = raw_stream(one_slot, empty_final, request)
    assert len(received) == FAIL_AFTER + 1
    *before, last = received
    assert not any(response.error_message for response in before)
    assert last.error_message.startswith("INTERNAL: ")
    finals = [response.infer_response.parameters["triton_final_response"].bool_param for response in received]
    assert not any(finals[:-1])


@pytest.mark.parametrize("empty_final", [False, True])
def test_h26_a_cancelled_stream_ends(one_slot, healthy, empty_final):
    request = {"text_input": "Hello", "max_tokens": 2000, "ignore_eos": True}
    *received, status = raw_stream(one_slot, empty_final, request, cancel_after=3)
    assert len(received) == 3
    assert status is grpc.StatusCode.CANCELLED


def test_h26_the_client_ends_by_itself(one_slot, healthy):
    with Client(one_slot.grpc_url) as client:
        for _ in range(20):
            assert client.generate(text_input="Hello", max_tokens=2, ignore_eos=True, timeout=30).num_output_tokens == 2


# H24, H25: the same answers from whichever file the weights come


TEXTS = ["  two spaces", "crème brûlée", "a 😀 b", "if x:\n    return 12", "plain words"]


def answers(model: Path) -> list[tuple[int, tuple[int, ...]]]:
    """(tokens of the prompt, greedy ids) for each text, from a server of this model."""
    with serve_folder(model) as client:
        got = [client.generate(text_input=text, max_tokens=16, temperature=0.0, ignore_eos=True) for text in TEXTS]
        again = client.generate(text_input=TEXTS[0], max_tokens=16, temperature=0.0, ignore_eos=True)
        assert again.token_ids == got[0].token_ids
        return [(answer.num_input_tokens, answer.token_ids) for answer in got]


@pytest.mark.slow
def test_h24_gguf_and_safetensors_give_the_same_answers(tmp_path):
    folder = make_tiny(tmp_path / "hf", heads=4, kv_heads=2)
    # weights that F16 holds exactly, so that greedy answers must be equal, not only close
    edit_tensors(folder, lambda tensors: [tensor.copy_(tensor.half().float()) for tensor in tensors.values()])
    assert answers(folder) == answers(to_gguf(folder, tmp_path / "model.gguf"))


@pytest.mark.parametrize("kind", ["hf", "gguf"])
def test_h24_qwen2_is_refused_by_name(tmp_path, kind):
    folder = make_tiny(tmp_path / "hf", family="qwen2")
    model = folder if kind == "hf" else to_gguf(folder, tmp_path / "model.gguf")
    with pytest.raises((LaunchError, ModelError), match="qwen2"), serve_folder(model):
        pass


@pytest.mark.parametrize(
    ("tied", "sharded"),
    [
        pytest.param(True, True, id="tied-sharded"),
        pytest.param(False, False, id="untied-one-file"),
        pytest.param(True, False, id="tied-one-file", marks=pytest.mark.full),
        pytest.param(False, True, id="untied-sharded", marks=pytest.mark.full),
    ],
)
def test_h25_tied_and_untied_heads(tmp_path, tied, sharded):
    folder = make_tiny(tmp_path / "model", tied=tied, sharded=sharded)
    assert answers(folder) == reference_answers(folder)


def test_h25_a_redundant_head_of_a_tied_model_changes_nothing(tmp_path):
    folder = make_tiny(tmp_path / "tied", tied=True)
    edit_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert answers(folder) == reference_answers(folder)


def test_h25_a_missing_head_is_refused_by_name(tmp_path):
    folder = make_tiny(tmp_path / "untied", tied=False)
    edit_tensors(folder, lambda tensors: tensors.pop("lm_head.weight"))
    with pytest.raises((LaunchError, ModelError), match=r"lm_head\.weight"), serve_folder(folder):
        pass


def reference_answers(folder: Path) -> list[tuple[int, tuple[int, ...]]]:
    """The same by transformers alone."""
    from transformers import AutoModelForCausalLM

    model, tokenizer = AutoModelForCausalLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    # a random model may well choose the end token; both go on
    model.generation_config.eos_token_id = None
    found = []
    for text in TEXTS:
        ids = tokenizer(text, return_tensors="pt").input_ids
        out = model.generate(ids, max_new_tokens=16, do_sample=False, pad_token_id=0)
        found.append((ids.shape[1], tuple(out[0, ids.shape[1] :].tolist())))
    return found


# H31


def with_bos(folder: Path, template_writes_bos: bool) -> PreTrainedTokenizerFast:
    """Give a tiny model's tokenizer a BOS and EOS of its own around every text, and its template a BOS or none."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    bos, eos = "<|im_start|>", "<|im_end|>"
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos} $A {eos}", special_tokens=[(bos, 1), (eos, 2)]
    )
    start = "{{ '" + bos + "' }}" if template_writes_bos else ""
    tokenizer.chat_template = start + "{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}"
    tokenizer.save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


@pytest.mark.parametrize("template_writes_bos", [True, False])
def test_h31_exactly_one_bos_and_no_eos(tmp_path, template_writes_bos):
    folder = make_tiny(tmp_path / "model")
    tokenizer = with_bos(folder, template_writes_bos)
    plain = tokenizer("What is a cache?", add_special_tokens=False).input_ids
    messages = [{"role": "user", "content": "What is a cache?"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert chat.count(1) == template_writes_bos
    greedy = {"temperature": 0.0, "max_tokens": 8, "ignore_eos": True}
    with serve_folder(folder) as client:
        # the ids can't be read back, but a random model answers every prompt differently
        expected = client.generate(input_ids=[1, *plain], **greedy)
        assert expected != client.generate(input_ids=[1, 1, *plain], **greedy)
        assert client.generate(text_input="What is a cache?", **greedy) == expected
        assert client.generate(text_input="<|im_start|>What is a cache?", **greedy) == expected
        assert client.generate(messages=messages, **greedy) == client.generate(input_ids=chat, **greedy)
