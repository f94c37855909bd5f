"""One answer, whichever door it comes through: streamed or whole, gRPC or HTTP, `llm` or `generate`."""

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, trainers
from transformers import PreTrainedTokenizerFast

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom_client import Client
from support.http_door import answer, events
from support.server import REFERENCE, assert_idle, canary
from support.some_tokenizers import whole_decode
from support.tiny_models import make_tiny


@pytest.fixture(autouse=True)
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


def texts(server: Server, client: Client, request: dict[str, Any]) -> dict[str, str]:
    """The text of one request through every door, none of them echoing the prompt."""
    found = {}
    for model in ("llm", "generate"):
        found[f"{model} whole"] = client.generate(**request, model=model, timeout=300).text
        found[f"{model} streamed"] = "".join(chunk.text for chunk in client.stream(**request, model=model, timeout=300))
    sampling = {key: value for key, value in request.items() if key not in ("text_input", "sampling_parameters")}
    body = {"text_input": request["text_input"], "exclude_input_in_output": True, **sampling}
    found["http whole"] = answer(server, **body)["text_output"]
    found["http streamed"] = "".join(event["text_output"] for event in events(server, **body, stream=True))
    return found


def agree(server: Server, client: Client, request: dict[str, Any]) -> str:
    found = texts(server, client, request)
    assert len(set(found.values())) == 1, found
    return found["llm whole"]


def reference_prompts(server: Server, client: Client, references: list[dict], at_once: int) -> None:
    def one(reference: dict) -> None:
        greedy = {"temperature": 0.0, "max_tokens": 12, "ignore_eos": True}
        agree(server, client, {"text_input": reference["prompt"], **greedy})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, references))


def test_reference_prompts(server, client):
    reference_prompts(server, client, REFERENCE[::4], at_once=8)


@pytest.mark.full
def test_reference_prompts_full(server, client):
    reference_prompts(server, client, REFERENCE, at_once=8)


def random_texts(server: Server, client: Client, seeds: int, at_once: int) -> None:
    def one(seed: int) -> None:
        agree(server, client, {"text_input": "Once upon a time", "temperature": 1.5, "seed": seed, "max_tokens": 24})

    with ThreadPoolExecutor(at_once) as pool:
        list(pool.map(one, range(seeds)))


def test_random_texts(server, client):
    random_texts(server, client, 4, at_once=8)


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_random_texts_full(server, client):
    random_texts(server, client, 200, at_once=8)


def test_h02_sentencepiece_keeps_its_blanks(tmp_path):
    folder = make_tiny(tmp_path / "model")
    tokenizer = sentencepiece(folder)
    settings = {"model": str(folder), "weights": "fp32", "kv_blocks": "64", "block_size": "16", "threads": "1"}
    with Server.start(ModelRepository(settings), exit_timeout_s=5) as server, Client(server.grpc_url) as client:
        for prompt in ("What is deep learning?", "It ends in a space ", "It ends in a newline\n"):
            # a random model repeats one byte if it may; this way it writes words, blanks and broken characters
            sampling = {"temperature": 5.0, "seed": 4, "max_tokens": 64, "ignore_eos": True}
            request = {"text_input": prompt, **sampling}
            text = agree(server, client, request)
            ids = client.generate(**request).token_ids
            assert text == whole_decode(tokenizer.backend_tokenizer, ids)
            assert " " in text
        assert_idle(server)


def sentencepiece(folder) -> PreTrainedTokenizerFast:
    """Replace a tiny model's tokenizer by one of Llama 2's kind, trained here."""
    backend = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True, unk_token="<unk>"))
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    special = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=352, special_tokens=special, show_progress=False)
    backend.train_from_iterator(["What is deep learning? It ends in a space, or a newline; so it goes."] * 8, trainer)
    # the byte tokens are plain ones: only the trainer had to be told of them

    content = json.loads(backend.to_str())
    content["added_tokens"] = [token for token in content["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(content)), bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )
    tokenizer.save_pretrained(folder)
    return tokenizer
