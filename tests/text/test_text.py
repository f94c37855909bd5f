"""The joined deltas of an answer are the decoded text of the whole answer (H01, H02)."""

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend
from transformers import PreTrainedTokenizerFast

from kvloom.text.bad_words import banned_tokens
from kvloom.text.stop_strings import TextStream
from kvloom.text.tokenizer import Tokenizer
from support.server import REFERENCE
from support.some_tokenizers import (
    TRICKY,
    default_tokenizer,
    deltas,
    sentencepiece_tokenizer,
    sentencepiece_tokenizer_without_prefix,
    whole_decode,
)

TOKENIZERS = [default_tokenizer, sentencepiece_tokenizer, sentencepiece_tokenizer_without_prefix]


@cache
def interesting_ids(make: Any) -> list[int]:
    """Single bytes, special tokens, blanks and ids beyond the vocabulary; all the rest comes from the whole range."""
    tokenizer: Tokenizer = make()
    backend = tokenizer._backend
    spelled = [backend.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
    spelled += [backend.token_to_id(character) for character in map(chr, range(0x21, 0x144))]
    texts = ["a", " a", "  ", "\n", "é", "天气", "😀", "👩‍👩‍👧", "\ufffd", "<s>", "<|im_end|>", "<|im_start|>"]
    ids = [token_id for text in texts for token_id in tokenizer.encode(text)]
    top = tokenizer.vocab_size
    return sorted({i for i in spelled if i is not None}) + ids * 4 + [0, 1, 2, top - 1, top, top + 7]


@st.composite
def ids_of(draw: st.DrawFn, make: Any) -> list[int]:
    some = st.sampled_from(interesting_ids(make)) | st.integers(0, make().vocab_size + 9)
    return draw(st.lists(some, max_size=40))


@pytest.mark.parametrize("make", TOKENIZERS)
def test_deltas_are_a_whole_decode(make: Any):
    tokenizer = make()

    @settings(max_examples=400, deadline=None)
    @given(ids_of(make))
    def check(ids: list[int]) -> None:
        found, stopped = deltas(tokenizer, ids)
        assert "".join(found) == whole_decode(tokenizer._backend, ids) == tokenizer.decode(ids)
        assert not stopped

    check()


@pytest.mark.parametrize("make", TOKENIZERS)
def test_every_token_of_the_vocabulary(make: Any):
    tokenizer = make()
    for token_id in range(tokenizer.vocab_size):
        stream = TextStream(tokenizer)
        assert stream.push(token_id) + stream.flush() == whole_decode(tokenizer._backend, [token_id]), token_id


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: entry["name"])
def test_real_answers_come_as_they_are_decoded(entry: dict[str, Any]):
    found, _ = deltas(default_tokenizer(), entry["ids"])
    assert "".join(found) == whole_decode(default_tokenizer()._backend, entry["ids"])
    assert all(found[:-1]) or not entry["text"].isascii() or "<|" in entry["text"], "plain text must not lag"


@pytest.mark.parametrize("make", TOKENIZERS)
@pytest.mark.parametrize("text", TRICKY)
def test_prompts_that_are_streamed_back(make: Any, text: str):
    tokenizer = make()
    assert "".join(deltas(tokenizer, tokenizer.encode(text))[0]) == text


def test_a_character_of_two_tokens_comes_whole():
    tokenizer = default_tokenizer()
    ids = tokenizer.encode("a😀b")
    assert len(ids) > 3, "the emoji must span tokens"
    found, _ = deltas(tokenizer, ids)
    assert [text for text in found if text] == ["a", "😀", "b"]


def test_an_incomplete_character_is_replaced_at_the_end_only():
    tokenizer = default_tokenizer()
    ids = tokenizer.encode("a😀")[:-1]
    found, _ = deltas(tokenizer, ids)
    assert "".join(found[:-1]) == "a"
    assert "".join(found) == tokenizer.decode(ids) == "a\ufffd"


def test_byte_runs_of_sentencepiece():
    """A character is there with its last byte, whatever follows; what never became one is one U+FFFD."""
    tokenizer = sentencepiece_tokenizer()
    owl = tokenizer.encode("🦉")[-4:]
    letter = tokenizer.encode_after(None, "a", "text_input")
    assert deltas(tokenizer, [*owl, *letter])[0] == ["", "", "", "🦉", "a", ""]
    assert deltas(tokenizer, [*owl, *owl, *owl[:3]])[0] == ["", "", "", "🦉", "", "", "", "🦉", "", "", "", "\ufffd"]
    assert deltas(tokenizer, [*owl[:2], *owl, *letter])[0] == ["", "", "\ufffd", "", "", "🦉", "a", ""]
    assert deltas(tokenizer, [*owl, owl[-1], *owl[:3], *letter])[0] == [
        *["", "", "", "🦉", "\ufffd"],
        "",
        "",
        "",
        "\ufffda",
        "",
    ]
    # a special token is skipped before decoding, so the run goes on
    assert "".join(deltas(tokenizer, [*owl[:2], 2, *owl[2:]])[0]) == "🦉"


def test_a_stop_string_inside_a_run_of_bytes_is_seen_at_once():
    tokenizer = sentencepiece_tokenizer()
    ids = tokenizer.encode("🦉🦉🦉")[-12:]
    stream, read = TextStream(tokenizer, ("🦉🦉",)), 0
    while not stream.stopped:
        assert stream.push(ids[read]) == ""
        read += 1
    assert read == 8


def test_added_tokens_with_plain_spelling():
    """What stands outside the byte alphabet stands for itself, and special tokens are skipped."""
    backend = Backend(models.BPE(vocab={"a": 0, "Ġb": 1, "x y": 2, "Ã": 3, "©": 4}, merges=[]))
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    backend.add_special_tokens([AddedToken("<s>", special=True)])
    backend.add_tokens([AddedToken("  "), AddedToken("<think>"), AddedToken("Ġ思")])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), prefix=[], eos_ids=[])
    for ids in ([0, 1, 2], [3, 4], [3, 5, 4], [3, 6, 4], [7, 8, 0], [3, 99, 4]):
        assert "".join(deltas(tokenizer, ids)[0]) == backend.decode(ids)
    assert "".join(deltas(tokenizer, [3, 5, 4])[0]) == "é"


@pytest.mark.parametrize("in_vocabulary", [True, False])
def test_added_tokens_whose_letters_all_spell_bytes(in_vocabulary: bool):
    """What was added is matched in raw text and is that text (K10), but for single letters: the bytes of others."""
    names = ["größe", "Ä!", "Ġx", "©"]
    vocabulary = {character: i for i, character in enumerate(["a", "Ã", "©", "Ġ", "g", "r"])}
    added = {name: len(vocabulary) + i for i, name in enumerate(names[:3])}
    backend = Backend(models.BPE(vocab=vocabulary | (added if in_vocabulary else {}), merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_tokens([AddedToken(name, normalized=False) for name in names])
    tokenizer = Tokenizer(PreTrainedTokenizerFast(tokenizer_object=backend), prefix=[], eos_ids=[])
    for name, token_id in added.items():
        assert tokenizer.encode(f"a{name}gr") == [0, token_id, 4, 5]
        assert tokenizer.decode([token_id]) == name
        assert deltas(tokenizer, [0, token_id, 4])[0] == ["a", name, "g", ""]
        assert deltas(tokenizer, [0, token_id, 4], [name[1:]])[0] == ["a", name[0], "", ""]
    assert banned_tokens(tokenizer, ["größe"])[0] == {(): (added["größe"],)}
    assert tokenizer.decode([1, 2]) == "é"


def test_the_decoder_of_the_tests_is_the_one_of_llama():
    """The SentencePiece tokenizer above has the decoder that Llama's own tokenizer.json has."""
    steps = json.loads(sentencepiece_tokenizer()._backend.to_str())["decoder"]["decoders"]
    assert [step["type"] for step in steps] == ["Replace", "ByteFallback", "Fuse", "Strip"]
