"""Faults that users of such servers reported, on the real server: texts and ends of tokens (K05, K10, K11, K14)."""

import json

import pytest
from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvloom_client import Client
from support.server import assert_idle, canary
from support.tiny_models import edit_config, make_it_say, make_sentencepiece_tiny, make_tiny
from support.tiny_server import serve_folder

BOTH = {"temperature": 0.0, "max_tokens": 40, "ignore_eos": True}


@pytest.fixture
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


def streamed(client: Client, **request: object) -> tuple[str, list[int], str]:
    """Text, token ids and finish reason of a streamed answer."""
    chunks = list(client.stream(**request, timeout=120))
    return "".join(chunk.text for chunk in chunks), [t for c in chunks for t in c.token_ids], chunks[-1].finish_reason


def test_k14_the_text_of_a_special_token_stops(client, _healthy):
    start = 1
    # <|im_start|> comes whenever a space may, and is no end token
    request = {**BOTH, "text_input": "The capital city of France is", "logit_bias": {str(start): 100.0}}
    for stop in ("<|im_start|>", ["never", "<|im_start|>"], "<|im_start|><|im_start|>"):
        spelled = stop if isinstance(stop, str) else stop[1]
        text, ids, reason = streamed(client, **request, stop=stop)
        assert (text, ids, reason) == ("", [start] * spelled.count("<|im_start|>"), "stop")
        whole = client.generate(**request, stop=stop)
        assert (whole.text, list(whole.token_ids), whole.finish_reason) == (text, ids, reason)
        kept = client.generate(**request, stop=stop, include_stop_str_in_output=True)
        assert kept.text == spelled
    # in the middle, with text around
    end = 2
    chat = {**BOTH, "messages": [{"role": "user", "content": "What is the capital of France?"}]}
    answer = client.generate(**chat)
    assert end in answer.token_ids
    before = list(answer.token_ids)[: answer.token_ids.index(end) + 1]
    text, ids, reason = streamed(client, **chat, stop="<|im_end|>")
    assert (ids, reason) == (before, "stop")
    assert answer.text.startswith(text)
    last = text[-3:]
    assert streamed(client, **chat, stop=last + "<|im_end|>") == (text.removesuffix(last), before, "stop")


@pytest.mark.slow
def test_k05_characters_inside_a_run_of_bytes(tmp_path):
    folder = make_sentencepiece_tiny(tmp_path / "model", tied=False)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    run = [backend.token_to_id(f"<0x{byte:02X}>") for byte in "😀".encode()]
    make_it_say(folder, run)
    request = {**BOTH, "input_ids": [1, run[-1]], "max_tokens": 199}
    with serve_folder(folder) as client:
        chunks = list(client.stream(**request, timeout=120))
        said, tokens = "", 0
        for chunk in chunks[:-1]:
            said, tokens = said + chunk.text, tokens + len(chunk.token_ids)
            assert said == "😀" * (tokens // 4), "each is shown when it is whole"
        assert said + chunks[-1].text == "😀" * 49 + "\ufffd"
        assert client.generate(**request).text == "😀" * 49 + "\ufffd"
        assert streamed(client, **request, stop="😀😀") == ("", run * 2, "stop")
        stopped = client.generate(**request, stop="😀😀")
        assert (stopped.text, list(stopped.token_ids), stopped.finish_reason) == ("", run * 2, "stop")
        kept = client.generate(**request, stop=["x", "😀😀"], include_stop_str_in_output=True)
        assert (kept.text, kept.num_output_tokens) == ("😀😀", 8)
        told = client.generate(**{**request, "max_tokens": 4}, return_logprobs=True)
        assert (told.text, [entry["text"] for entry in told.logprobs]) == ("😀", ["\ufffd"] * 4)
        with client.conversation() as talk:
            assert talk.generate(**{**request, "max_tokens": 6}).text == "😀\ufffd"
            assert talk.generate(**{**request, "max_tokens": 5, "input_ids": [run[-1]]}).text == "😀\ufffd"


@pytest.mark.slow
def test_k10_added_tokens_whose_letters_all_spell_bytes(tmp_path):
    folder = make_tiny(tmp_path / "model", tied=False, vocab_size=400)
    backend = Backend.from_file(str(folder / "tokenizer.json"))
    backend.add_tokens([AddedToken("größe")])
    backend.save(str(folder / "tokenizer.json"))
    word, blank, other = backend.token_to_id("größe"), backend.encode(" ").ids[0], backend.encode("x").ids[0]
    make_it_say(folder, [word, blank])
    request = {**BOTH, "text_input": "größe ", "max_tokens": 5}
    with serve_folder(folder) as client:
        told = client.generate(**request, return_logprobs=True, sampling_parameters={"logprobs": 1})
        assert told.num_input_tokens == 2
        assert told.text == "größe größe größe"
        assert [entry["text"] for entry in told.logprobs] == ["größe", " ", "größe", " ", "größe"]
        assert told.logprobs[0]["top"][0]["text"] == "größe"
        assert streamed(client, **request) == (told.text, [word, blank, word, blank, word], "length")
        assert streamed(client, **request, stop="e g") == ("größ", [word, blank, word], "stop")
        assert streamed(client, **request, stop=["öß"])[0] == "gr"
        banned = client.generate(**request, bad_words=["größe"])
        assert word not in banned.token_ids
        biased = client.generate(**request, logit_bias={str(word): -100.0, str(other): 50.0})
        assert biased.text == "xxxxx"


@pytest.mark.slow
def test_k11_an_answer_ends_where_the_template_ends_it(tmp_path):
    folder = make_tiny(tmp_path / "model", tied=False)
    # the configs name another end, and there is no generation_config.json
    edit_config(folder, eos_token_id=0)
    (folder / "generation_config.json").unlink()
    named = folder / "tokenizer_config.json"
    named.write_text(json.dumps({**json.loads(named.read_text()), "eos_token": "<|endoftext|>"}))
    end = Backend.from_file(str(folder / "tokenizer.json")).token_to_id("<|im_end|>")
    make_it_say(folder, [end, 40])
    request = {"messages": [{"role": "user", "content": "x"}], "temperature": 0.0, "max_tokens": 20}
    with serve_folder(folder) as client:
        told = client.generate(**request)
        assert (told.finish_reason, told.token_ids[-1], told.text) == ("stop", end, "")
        told = client.generate(**request, ignore_eos=True)
        assert (told.finish_reason, told.num_output_tokens) == ("length", 20)
