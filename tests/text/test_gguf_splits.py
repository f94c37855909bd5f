"""The pre-tokenizers that GGUF files name, or do not name (K17)."""

import logging

import pytest

from kvloom.errors import ModelError
from kvloom.text.gguf_splits import PRE_TOKENIZERS
from kvloom.text.tokenizer import Tokenizer
from support.some_tokenizers import TRICKY, byte_level_metadata

ALIKE = [
    ("falcon3", "llama-bpe"),
    ("lfm2", "llama-bpe"),
    ("glm4", "dbrx"),
    ("mpt", "gpt-2"),
    ("olmo", "gpt-2"),
    ("command-r", "smollm"),
    ("megrez", "qwen2"),
]
"""A name and one of the same split, whose ids are compared with transformers' elsewhere."""


@pytest.mark.parametrize(("name", "known"), ALIKE)
def test_k17_names_of_the_same_split(name, known):
    named, other = (Tokenizer.from_gguf(byte_level_metadata(pre)) for pre in (name, known))
    for text in TRICKY:
        assert named.encode(text) == other.encode(text)


def test_k17_a_file_that_names_none_gets_llama_cpps_default(caplog):
    metadata = dict(byte_level_metadata("default"))
    default = Tokenizer.from_gguf(metadata)
    assert not caplog.messages
    del metadata["tokenizer.ggml.pre"]
    with caplog.at_level(logging.WARNING, "kvloom.text.gguf_splits"):
        unnamed = Tokenizer.from_gguf(metadata)
    [said] = caplog.messages
    assert "has no tokenizer.ggml.pre" in said and "convert the model again" in said
    for text in TRICKY:
        assert unnamed.encode(text) == default.encode(text)


def test_k17_a_name_that_is_not_supported_says_what_would_load():
    with pytest.raises(ModelError, match="'deepseek-llm' is not supported; use the model's Hugging Face folder, or"):
        Tokenizer.from_gguf(byte_level_metadata("deepseek-llm"))


@pytest.mark.parametrize("pre", sorted(PRE_TOKENIZERS))
def test_every_split_keeps_the_text(pre):
    tokenizer = Tokenizer.from_gguf(byte_level_metadata(pre))
    composed = PRE_TOKENIZERS[pre].nfc
    for text in ("a b  c\n\n d", "don't 12345\t(x)", "你好，世界 1234", "naïve—über"):
        assert composed or tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        # as the regexes of DeepSeek's and Falcon's tokenizer.json cut them
        ("deepseek-coder", "ab 1234, 你好", ["ab", " ", "1", "2", "3", "4", ",", " ", "你好"]),
        ("deepseek-v3", "ab 1234, 你好", ["ab", " ", "123", "4", ",", " ", "你好"]),
        ("deepseek-v3", ".com x", [".com", " x"]),
        ("falcon", "ab 1234, x`", ["ab", " ", "123", "4", ",", " x", "`"]),
        ("default", "ab 1234, x`", ["ab", " ", "123", "4", ",", " x", "`"]),
    ],
)
def test_words(pre, text, words):
    steps = PRE_TOKENIZERS[pre].steps
    pieces = [text]
    for step in steps:
        pieces = [word for piece in pieces for word, _ in step.pre_tokenize_str(piece)]
    assert pieces == words
