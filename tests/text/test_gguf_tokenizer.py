"""Tokenizers from GGUF files: the same ids as transformers and llama.cpp, and files that are refused."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from transformers import GPT2Tokenizer, Qwen2Tokenizer

from kvloom.errors import ModelError
from kvloom.text.tokenizer import Tokenizer
from support.some_tokenizers import (
    NAMED,
    TRICKY,
    byte_level_metadata,
    save_folder,
    sentencepiece,
    sentencepiece_metadata,
    transformers_from_gguf,
)


@pytest.mark.parametrize("pre", ["gpt-2", "llama-bpe", "llama3", "smaug-bpe", "dbrx", "qwen2", "tekken"])
def test_byte_level_gguf_equals_transformers(pre: str, tmp_path: Path):
    metadata = byte_level_metadata(pre)
    if pre == "qwen2":  # only the class itself composes characters, as Qwen's tokenizer.json does
        names = {"bos_token": None, "eos_token": "<|im_end|>", "unk_token": None, "pad_token": None}
        tokens = metadata["tokenizer.ggml.tokens"]
        merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
        theirs = Qwen2Tokenizer({token: i for i, token in enumerate(tokens)}, merges, **names)
        theirs.add_tokens(["<|begin|>", "<think>"])
    else:
        theirs = transformers_from_gguf(tmp_path, metadata)
    ours = Tokenizer.from_gguf(metadata)
    whole_words = pre in ("llama-bpe", "llama3", "tekken")
    prefix = [ours.bos_id] if whole_words else []
    for text in [*TRICKY, "".join(TRICKY), "<think>hm</think><|im_end|>x"]:
        expected = theirs.encode(text, add_special_tokens=False)
        assert ours.encode(text) == prefix + expected
        assert ours.decode(expected) == theirs.decode(expected, skip_special_tokens=True)


def words(pre: str, text: str) -> list[str]:
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    return [tokenizer.decode([token_id]) for token_id in tokenizer.encode(text)]


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", [" 345", " 6789"]),
        ("smollm", [" ", "3", "4", "5", " ", "6", "7", "8", "9"]),
        ("starcoder", [" ", "3", "4", "5", " ", "6", "7", "8", "9"]),
        ("refact", [" ", "3", "4", "5", " ", "6", "7", "8", "9"]),
        ("llama-bpe", [" ", "345", " ", "678", "9"]),
        ("qwen2", [" ", "3", "4", "5", " ", "6", "7", "8", "9"]),
        ("default", [" ", "345", " ", "678", "9"]),
    ],
)
def test_digits_are_cut_as_the_pre_tokenizer_says(pre: str, pieces: list[str]):
    assert "".join(pieces) == " 345 6789"
    borders = {sum(map(len, pieces[:i])) for i in range(len(pieces) + 1)}
    got = words(pre, " 345 6789")
    assert {sum(map(len, got[:i])) for i in range(len(got) + 1)} >= borders
    assert "".join(got) == " 345 6789"


def test_gpt2_crosses_digits_where_smollm_does_not():
    assert len(words("gpt-2", " 345 6789")) < len(words("smollm", " 345 6789"))


@pytest.mark.parametrize(("pre", "pieces"), [("gpt-2", 5), ("llama-bpe", 1), ("tekken", 1), ("dbrx", 5)])
def test_whole_words_need_no_merges_where_the_name_says_so(pre: str, pieces: int):
    metadata = dict(byte_level_metadata(pre))
    for key, value in (("tokens", "QZQZQ"), ("token_type", 1)):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], value]
    tokenizer = Tokenizer.from_gguf(metadata | {"tokenizer.ggml.add_bos_token": False})
    assert len(tokenizer.encode("QZQZQ")) == pieces


def merges_of(backend: Backend) -> list[list[str]]:
    return json.loads(backend.to_str())["model"]["merges"]


@pytest.mark.parametrize("scores", [True, False])
def test_sentencepiece_gguf_equals_its_own_tokenizer(scores: bool, tmp_path: Path):
    """As tokenizer.json and llama.cpp have it (K02); transformers 5 has no blank of its own before a blank and behind
    special tokens."""
    metadata = dict(sentencepiece_metadata())
    if not scores:  # some files carry merges instead
        merges = json.loads(sentencepiece().to_str())["model"]["merges"]
        metadata["tokenizer.ggml.merges"] = [" ".join(merge) for merge in merges]
    theirs = transformers_from_gguf(tmp_path, metadata)
    config = {"add_bos_token": True, "tokenizer_class": "LlamaTokenizer"}
    folder = Tokenizer.from_folder(save_folder(tmp_path, sentencepiece(), **NAMED, **config))
    ours, own = Tokenizer.from_gguf(metadata), sentencepiece()
    assert (ours.bos_id, ours.eos_ids) == (1, {2})
    assert merges_of(ours._backend) == merges_of(theirs.backend_tokenizer)
    for text in [*TRICKY, "".join(TRICKY), " hello", "hello</s>world", "<s>x</s>y", "a </s> b", "  <unk>  "]:
        expected = own.encode(text, add_special_tokens=False).ids
        assert ours.encode(text) == ([1] + expected if expected[0] != 1 else expected)
        assert folder.encode(text) == ours.encode(text)
        if not text.startswith(" ") and "<" not in text:
            assert theirs.encode(text, add_special_tokens=False) == expected
        assert ours.decode(expected) == own.decode(expected, skip_special_tokens=True)


def test_words_begin_as_in_llama_cpp():
    """Before each piece of text, the first and those behind special tokens, is a blank of its own."""
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata())
    tokens = [tokenizer._backend.id_to_token(i) for i in tokenizer.encode(" the</s>the <unk>  a")]
    words = "".join(tokens).replace("</s>", "|").replace("<unk>", "|").replace("<s>", "")
    assert words == "▁▁the|▁the▁|▁▁▁a"


def test_no_merge_makes_a_special_token():
    metadata = dict(sentencepiece_metadata()) | {"tokenizer.chat_template": "{{ bos_token }}{{ messages[0].content }}"}
    new = [token for token in ("<", "s", "s>", ">") if token not in metadata["tokenizer.ggml.tokens"]]
    for key, values in (("tokens", new), ("scores", [-1.0] * len(new)), ("token_type", [1] * len(new))):
        metadata[f"tokenizer.ggml.{key}"] = [*metadata[f"tokenizer.ggml.{key}"], *values]
    tokenizer = Tokenizer.from_gguf(metadata)
    ids = tokenizer.encode_chat([{"role": "user", "content": "a<s>"}])
    assert ids.count(1) == 1
    assert tokenizer.decode(ids) == "a<s>"


def test_sentencepiece_gguf_without_space_prefix():
    tokenizer = Tokenizer.from_gguf(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})
    for text in TRICKY:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize("pre", ["gpt-2", "qwen2"])
def test_byte_level_folder_and_gguf_agree(pre: str, tmp_path: Path):
    metadata = byte_level_metadata(pre)
    vocabulary = {token: i for i, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    named = {"bos_token": "<|begin|>", "eos_token": "<|im_end|>", "unk_token": "<|im_end|>", "pad_token": "<|im_end|>"}
    hf = {"gpt-2": GPT2Tokenizer, "qwen2": Qwen2Tokenizer}[pre](vocabulary, merges, **named)
    hf.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    folder, gguf = Tokenizer.from_folder(tmp_path), Tokenizer.from_gguf(metadata)
    for text in TRICKY:
        assert folder.encode(text) == gguf.encode(text)


def changed(**values: Any) -> dict[str, Any]:
    metadata = dict(byte_level_metadata("gpt-2"))
    for name, value in values.items():
        key = f"tokenizer.ggml.{name}"
        if value is None:
            metadata.pop(key)
        else:
            metadata[key] = value
    return metadata


@pytest.mark.parametrize(
    ("metadata", "parts"),
    [
        (changed(model="bert"), ["'bert'", "gpt2, llama"]),
        (changed(model=None), ["tokenizer.ggml.model"]),
        (changed(tokens=None), ["tokenizer.ggml.tokens"]),
        (changed(tokens=["a", "a"]), ["twice"]),
        (changed(tokens=[]), ["empty"]),
        (changed(pre="what"), ["'what'", "Hugging Face folder", "llama-bpe", "smollm"]),
        (changed(merges=None), ["tokenizer.ggml.merges"]),
        (changed(merges=["a zzz"]), ["'a zzz'"]),
        (changed(token_type=[1]), ["token_type", "1 entries"]),
        (changed(eos_token_id=10**6), ["eos_token_id=1000000"]),
        (changed(eos_token_id="</s>"), ["eos_token_id='</s>'"]),
        (changed(bos_token_id=None, add_bos_token=True), ["bos_token_id"]),
        (sentencepiece_metadata() | {"tokenizer.ggml.scores": [0.0]}, ["scores", "1 entries"]),
        (sentencepiece_metadata() | {"general.architecture": "gemma2"}, ["gemma2"]),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_gguf_that_can_not_be_understood_is_refused_by_name(metadata: dict[str, Any], parts: list[str]):
    with pytest.raises(ModelError, match=".*".join(parts)):
        Tokenizer.from_gguf(metadata)


@pytest.mark.parametrize("add_bos", [True, False, None])
def test_gguf_says_whether_bos_is_added(add_bos: bool | None):
    for metadata, default in ((changed(), False), (sentencepiece_metadata(), True)):
        said = metadata if add_bos is None else metadata | {"tokenizer.ggml.add_bos_token": add_bos}
        tokenizer = Tokenizer.from_gguf(said)
        assert (tokenizer.encode("the")[0] == tokenizer.bos_id) is (default if add_bos is None else add_bos)


def test_gguf_ends_are_found_by_id_and_by_name():
    metadata = changed(eos_token_id=5, eot_token_id=6, eom_token_id=7)
    im_end = metadata["tokenizer.ggml.tokens"].index("<|im_end|>")
    assert Tokenizer.from_gguf(metadata).eos_ids == {5, 6, 7, im_end}
