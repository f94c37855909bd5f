"""Prompts and chats to token ids: the same as transformers', one BOS, no EOS (H24, H31, H32)."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as Backend
from tokenizers import decoders
from transformers import AutoTokenizer

from kvloom.errors import InvalidArgument, ModelError
from kvloom.text.chat import parse_messages
from kvloom.text.tokenizer import Tokenizer
from support.server import REFERENCE
from support.some_tokenizers import (
    NAMED,
    TRICKY,
    byte_level_metadata,
    default_metadata,
    default_tokenizer,
    save_folder,
    sentencepiece,
)

USER = [{"role": "user", "content": "What is a cache?"}]
WITHOUT_BOS = "{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}"
WITH_BOS = "{{ bos_token }}" + WITHOUT_BOS
ENDS_IN_EOS = WITH_BOS + "{{ eos_token }}"


def strings(error: type[Exception], *parts: str) -> Any:
    return pytest.raises(error, match=".*".join(map(str, parts)))


# The default model


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: entry["name"])
def test_default_model_gives_the_reference_ids(entry: dict[str, Any]):
    tokenizer = default_tokenizer()
    ids = tokenizer.encode_chat(entry["messages"]) if "messages" in entry else tokenizer.encode(entry["prompt"])
    assert ids == entry["prompt_ids"]
    assert tokenizer.decode(entry["ids"], skip_special_tokens=False) == entry["text"]
    assert not set(tokenizer.decode(entry["ids"]).split()) & {"<|im_start|>", "<|im_end|>"}


@pytest.mark.parametrize("text", TRICKY)
def test_default_model_round_trips(text: str):
    assert default_tokenizer().decode(default_tokenizer().encode(text)) == text


def test_default_model_facts():
    tokenizer = default_tokenizer()
    assert (tokenizer.bos_id, tokenizer.vocab_size) == (1, 49152)
    assert tokenizer.eos_ids == {0, 2}  # <|endoftext|> and <|im_end|>
    assert tokenizer.encode("a")[0] != tokenizer.bos_id  # its add_bos_token is false


def test_default_model_loads_fast():
    metadata = default_metadata()
    Tokenizer.from_gguf(metadata)  # imports are not counted
    start = time.process_time()
    Tokenizer.from_gguf(metadata)
    assert time.process_time() - start < 2


# Folders


DIGITS = "12345 12345"


@pytest.mark.parametrize(("named", "pre"), [("GPT2Tokenizer", "llama-bpe"), ("Qwen2Tokenizer", "gpt-2")])
def test_a_folder_cuts_text_as_its_file_says(named: str, pre: str, tmp_path: Path):
    """Whatever class it names (K03): transformers 5 builds the tokenizer of some anew, with their own rules."""
    backend = Tokenizer.from_gguf(byte_level_metadata(pre))._backend
    special = {"eos_token": "<|im_end|>", "bos_token": "<|begin|>"}
    folder = save_folder(tmp_path, backend, tokenizer_class=named, **special)
    ours, own = Tokenizer.from_folder(folder), Backend.from_file(str(folder / "tokenizer.json"))
    for text in [*TRICKY, "".join(TRICKY), DIGITS]:
        assert ours.encode_piece(text, "text_input") == own.encode(text, add_special_tokens=False).ids
    assert (ours.bos_id, ours.eos_ids) == (own.token_to_id("<|begin|>"), {own.token_to_id("<|im_end|>")})
    rebuilt = AutoTokenizer.from_pretrained(folder).encode(DIGITS, add_special_tokens=False)
    assert rebuilt != own.encode(DIGITS).ids, "transformers agrees: the README needs not name this class"


def test_special_tokens_that_only_the_class_names(tmp_path: Path):
    folder = save_folder(tmp_path, sentencepiece(), tokenizer_class="LlamaTokenizer")
    assert Tokenizer.from_folder(folder).eos_ids == {2}


# BOS and EOS (H31)


@pytest.mark.parametrize("adds_eos", [False, True])
@pytest.mark.parametrize("adds_bos", [False, True])
@pytest.mark.parametrize("named", ["PreTrainedTokenizerFast", "LlamaTokenizer"])
def test_a_prompt_has_one_bos_and_no_eos(adds_bos: bool, adds_eos: bool, named: str, tmp_path: Path):
    settings: dict[str, Any] = {"tokenizer_class": named}
    if named == "LlamaTokenizer":  # it takes no post-processor from the file
        settings |= {"add_bos_token": adds_bos, "add_eos_token": adds_eos}
    folder = save_folder(tmp_path, sentencepiece(adds_bos=adds_bos, adds_eos=adds_eos), **NAMED, **settings)
    hf, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    assert hf.encode("the cache")[-1:] == [2] if adds_eos else True, "this tokenizer must add EOS itself"
    for text in ("the cache", "<s>the cache", "the <s> cache"):
        ids = ours.encode(text)
        assert ids.count(1) == (adds_bos and not text.startswith("<s>")) + text.count("<s>")
        assert (ids[0] == 1) is (adds_bos or text.startswith("<s>"))
        assert ids[-1] != 2
    expected = hf.encode("the cache")
    assert ours.encode("the cache") == (expected[:-1] if adds_eos else expected)


@pytest.mark.parametrize("template", [WITH_BOS, WITHOUT_BOS, ENDS_IN_EOS])
@pytest.mark.parametrize("adds_eos", [False, True])
def test_a_chat_has_the_ids_of_apply_chat_template(template: str, adds_eos: bool, tmp_path: Path):
    tokenizer = sentencepiece(adds_eos=adds_eos)
    folder = save_folder(tmp_path, tokenizer, **NAMED, chat_template=template)
    hf, ours = AutoTokenizer.from_pretrained(folder), Tokenizer.from_folder(folder)
    for messages in (USER, [*USER, {"role": "assistant", "content": " 😀"}, {"role": "user", "content": "< s>?"}]):
        ids = ours.encode_chat(messages)
        assert ids == hf.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]
        assert (ids.count(1), ids.count(2)) == (template.count("bos_token"), template.count("eos_token"))
    ids = ours.encode_chat([{"role": "user", "content": "</s><s>?"}])
    assert (ids.count(1), ids.count(2)) == (template.count("bos_token"), template.count("eos_token"))


def test_ends_come_from_every_config(tmp_path: Path):
    folder = save_folder(tmp_path, sentencepiece(), config={"eos_token_id": 7}, **NAMED)
    assert Tokenizer.from_folder(folder).eos_ids == {2, 7}
    (folder / "generation_config.json").write_text('{"eos_token_id": [8, 9]}')
    assert Tokenizer.from_folder(folder).eos_ids == {2, 7, 8, 9}
    (folder / "generation_config.json").write_text('{"eos_token_id": "</s>"}')
    with strings(ModelError, "generation_config.json", "eos_token_id"):
        Tokenizer.from_folder(folder)


def test_truncation_and_padding_of_the_file_are_off(tmp_path: Path):
    tokenizer = sentencepiece()
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=4, pad_id=0, pad_token="<unk>")
    ours = Tokenizer.from_folder(save_folder(tmp_path, tokenizer, **NAMED))
    assert ours.decode(ours.encode("the answer is that")) == "the answer is that"
    assert 0 not in ours.encode("a")


# What can't be loaded


def test_folders_that_can_not_be_loaded(tmp_path: Path):
    with strings(ModelError, "no tokenizer.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{")
    with strings(ModelError, "tokenizer.json"):
        Tokenizer.from_folder(tmp_path)


def test_a_decoder_that_can_not_be_streamed_is_refused(tmp_path: Path):
    tokenizer = sentencepiece()
    tokenizer.decoder = decoders.WordPiece()
    with strings(ModelError, "WordPiece", "ByteLevel"):
        Tokenizer.from_folder(save_folder(tmp_path, tokenizer, **NAMED))


# Requests


@pytest.mark.parametrize("text", ["x \ud83d", "\ude00 y", "\ude00\ud83d"])
def test_half_a_surrogate_pair_is_refused(text: str):
    with strings(InvalidArgument, "text_input: ", "surrogate"):
        default_tokenizer().encode(text)
    for message in ({"role": "user", "content": text}, {"role": text, "content": "x"}):
        with strings(InvalidArgument, "messages: ", "surrogate"):
            default_tokenizer().encode_chat([message])


def test_whole_pairs_and_nul_are_text():
    messages = parse_messages('[{"role": "user", "content": "\\ud83d\\ude00 \\u0000"}]')
    assert "😀 \x00" in default_tokenizer().decode(default_tokenizer().encode_chat(messages))


def test_an_empty_prompt_is_refused():
    with strings(InvalidArgument, "text_input: ", "empty"):
        default_tokenizer().encode("")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "non-empty"),
        ("{}", "non-empty"),
        ('"hi"', "non-empty"),
        ("null", "non-empty"),
        ('["hi"]', "message 0 must be an object"),
        ('[{"role": "user", "content": "x"}, {"content": "x"}]', "message 1: role"),
        ('[{"role": 1, "content": "x"}]', "message 0: role"),
        ('[{"role": "user"}]', "message 0: content"),
        ('[{"role": "user", "content": null}]', "message 0: content"),
        ('[{"role": "user", "content": null, "tool_calls": []}]', "message 0: content"),
        ('[{"role": "user", "content": 7}]', "message 0: content"),
        ('[{"role": "user", "content": {"type": "text", "text": "x"}}]', "message 0: content"),
        ('[{"role": "user", "content": []}]', "message 0: content"),
        ('[{"role": "user", "content": ["x"]}]', "message 0: content: part 0 must be an object"),
        ('[{"role": "user", "content": [{"text": "x"}]}]', "message 0: content: part 0 must be an object"),
        ('[{"role": "user", "content": [{"type": "text"}]}]', "message 0: content: part 0: text must be a string"),
        (
            '[{"role": "user", "content": [{"type": "text", "text": "x"}, {"type": "image_url", "image_url": {}}]}]',
            "message 0: content: part 1 is of type 'image_url'",
        ),
    ],
)
def test_malformed_messages_are_refused(text: str, part: str):
    with strings(InvalidArgument, "^messages: |INVALID_ARG: messages: ", part):
        parse_messages(text)


@pytest.mark.parametrize(
    ("template", "part"),
    [
        ("{{ raise_exception('System role not supported') }}", "System role not supported"),
        ("{{ messages[0].tool.name }}", "has no attribute 'tool'"),
        ("{{ messages[0].content + 1 }}", "can't render"),
        ("{{ 1 // 0 }}", "can't render"),
        ("{% for %}", "chat template"),
        (None, "no chat template; send text_input"),
    ],
)
def test_a_template_that_refuses_is_heard(template: str | None, part: str, tmp_path: Path):
    tokenizer = Tokenizer.from_folder(save_folder(tmp_path, sentencepiece(), **NAMED, chat_template=template))
    with strings(InvalidArgument, "messages: ", part):
        tokenizer.encode_chat(USER)


def test_deeply_nested_messages_are_refused():
    for depth in (100, 300, 600, 900, 990):
        text = '[{"role": "user", "content": "x", "extra": ' + "[" * depth + "]" * depth + "}]"
        try:
            ids = default_tokenizer().encode_chat(parse_messages(text))
        except InvalidArgument as error:
            assert error.field == "messages"
        else:
            assert ids == default_tokenizer().encode_chat([{"role": "user", "content": "x"}])


def test_threads_can_share_a_tokenizer():
    tokenizer = default_tokenizer()
    work = [text * repeat for repeat in (1, 5, 25) for text in TRICKY]
    expected = [(tokenizer.encode(text), tokenizer.encode_chat([{"role": "user", "content": text}])) for text in work]
    with ThreadPoolExecutor(8) as pool:
        prompts = list(pool.map(tokenizer.encode, work))
        chats = list(pool.map(lambda text: tokenizer.encode_chat([{"role": "user", "content": text}]), work))
    assert list(zip(prompts, chats, strict=True)) == expected
