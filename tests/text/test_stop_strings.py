"""Stop strings cut the text at the first match, wherever tokens end; text is not sent too early (H03, H04)."""

import re
from collections.abc import Iterable, Sequence
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvloom.text.stop_strings import TextStream
from kvloom.text.tokenizer import Tokenizer
from support.server import REFERENCE
from support.some_tokenizers import (
    default_tokenizer,
    deltas,
    sentencepiece_tokenizer,
    sentencepiece_tokenizer_without_prefix,
)


def cut(whole: str, stops: Sequence[str], include: bool) -> str:
    """The rule, slowly: read character by character until the text ends in a stop string; the longest counts."""
    for end in range(1, len(whole) + 1):
        ending = [stop for stop in stops if whole[:end].endswith(stop)]
        if ending:
            return whole[: end if include else end - max(map(len, ending))]
    return whole


def undecided(text: str, stops: Sequence[str]) -> int:
    """How many characters at the end of a text may be the beginning of a stop string."""
    return max((n for stop in stops for n in range(len(stop)) if text.endswith(stop[:n])), default=0)


@cache
def few_letters(make: Any) -> list[int]:
    """Tokens of one to four of the letters a and b, and halves of a character."""
    tokenizer: Tokenizer = make()
    texts = ["a", "b", "aa", "ab", "ba", "bb", "aab", "abb", "aaa"]
    ids = [token_id for text in texts for token_id in tokenizer.encode(f"x{text}")[1:]]
    backend = tokenizer._backend
    return ids + [i for i in map(backend.token_to_id, ("Ã", "©", "<0xC3>", "<0xA9>")) if i is not None]


@pytest.mark.parametrize("make", [default_tokenizer, sentencepiece_tokenizer])
def test_stop_strings_cut_the_text_wherever_tokens_end(make: Any):
    tokenizer = make()
    stops_of = st.lists(st.text("abé\ufffd", min_size=1, max_size=5), min_size=1, max_size=3)

    @settings(max_examples=600, deadline=None)
    @given(st.lists(st.sampled_from(few_letters(make)), max_size=30), stops_of, st.booleans())
    def check(ids: list[int], stops: list[str], include: bool) -> None:
        stream = TextStream(tokenizer, tuple(stops), include)
        plain = TextStream(tokenizer)
        whole = tokenizer.decode(ids)
        expected = cut(whole, stops, include)
        sent = certain = ""
        for token_id in ids:
            certain += plain.push(token_id)
            sent += stream.push(token_id)
            if not stream.stopped:  # exactly what can't be part of a stop string any more
                assert sent == certain[: len(certain) - undecided(certain, stops)]
            assert expected.startswith(sent)
        sent += stream.flush()
        assert sent == expected
        assert stream.stopped is any(stop in whole for stop in stops)
        if stream.stopped:
            assert stream.push(ids[0]) == stream.flush() == ""

    check()


@pytest.mark.parametrize("entry", REFERENCE, ids=lambda entry: entry["name"])
def test_a_stop_inside_any_token_of_a_real_answer(entry: dict[str, Any]):
    """H04: three characters from the middle of a token, and H03: a stop that spans several tokens."""
    tokenizer = default_tokenizer()
    whole = tokenizer.decode(entry["ids"])
    pieces = [tokenizer.decode([token_id]) for token_id in entry["ids"]]
    middles = {piece[1:4] for piece in pieces if len(piece) > 4 and "\ufffd" not in piece}
    spans = {whole[start : start + 12] for start in range(0, len(whole) - 12, 7)}
    assert spans
    for stop in middles | spans:
        found, stopped = deltas(tokenizer, entry["ids"], [stop])
        assert stopped
        assert "".join(found) == whole[: whole.index(stop)]


def test_the_alphabet_is_never_sent_early():
    tokenizer = default_tokenizer()
    ids = tokenizer.encode("Here is the alphabet: ABC DEFGHIJ KLM")
    stream = TextStream(tokenizer, ("DEFGHIJ",))
    sent = []
    for token_id in ids:
        sent.append(stream.push(token_id))
        if stream.stopped:
            break
    assert stream.stopped
    assert "".join(sent) == "Here is the alphabet: ABC "
    assert len(tokenizer.encode("DEFGHIJ")) >= 3


@pytest.mark.parametrize(
    ("text", "stops", "kept"),
    [
        ("aaab", ["aab"], "a"),
        ("aabaabaac", ["aabaac"], "aab"),
        ("one two three", ["three", "two"], "one "),
        ("one two three", ["two three", "two"], "one "),
        ("xyz", ["yz", "xyz"], ""),  # both end here: the longer
        ("abcdef", ["abcdef", "cd"], "ab"),  # what is complete first
        ("Paris is", ["Par"], ""),
        ("Paris is", ["Paris is it"], "Paris is"),
        ("café", ["é"], "caf"),
        ("a\n\nb", ["\n\n"], "a"),
    ],
)
def test_which_stop_and_where(text: str, stops: list[str], kept: str):
    tokenizer = default_tokenizer()
    found, stopped = deltas(tokenizer, tokenizer.encode(text), stops)
    assert "".join(found) == kept
    assert stopped is (kept != text)


def test_a_stop_that_completes_in_the_last_bytes_is_seen():
    tokenizer = sentencepiece_tokenizer()
    stream = TextStream(tokenizer, ("\ufffd",))
    assert "".join(stream.push(token_id) for token_id in tokenizer.encode("a🦉")[:-1]) == "a"
    assert not stream.stopped
    assert stream.flush() == ""
    assert stream.stopped


def items(tokenizer: Tokenizer, ids: Iterable[int]) -> list[str]:
    """The characters of an answer, and its special tokens as one piece each."""
    return [
        item
        for token_id in ids
        for item in (
            [tokenizer.special_tokens[token_id]]
            if token_id in tokenizer.special_tokens
            else tokenizer.decode([token_id])
        )
    ]


def cut_at_items(found: Sequence[str], stops: Sequence[str], include: bool) -> tuple[str, bool]:
    """The rule, slowly: read until what was read, with special tokens or without, ends in a stop string."""
    for end in range(1, len(found) + 1):
        read, new = found[:end], found[end - 1]
        text = "".join(item for item in read if len(item) == 1)
        ends = []
        for stop in stops:
            if len(new) == 1 and text.endswith(stop):
                ends.append((len(stop), len(stop), stop))
            spelled = [part for part in re.split(r"(<s>|</s>|<unk>|<\|\w+\|>)", stop) if part]
            parts = [one for part in spelled for one in ([part] if part[0] == "<" and part[-1] == ">" else part)]
            if len(parts) < len(stop) and read[-len(parts) :] == parts:
                ends.append((sum(len(part) == 1 for part in parts), len(stop), stop))
        if ends:
            length, _, stop = max(ends)
            return text[: len(text) - length] + (stop if include else ""), True
    return "".join(item for item in found if len(item) == 1), False


@pytest.mark.parametrize("make", [default_tokenizer, sentencepiece_tokenizer_without_prefix])
def test_a_stop_string_finds_the_special_tokens_that_it_spells(make: Any):
    tokenizer = make()
    names = sorted(tokenizer.special_tokens.items())[:3]
    letters = [tokenizer.encode(f"x{letter}")[-1] for letter in ("a", "b", "ab")]
    pieces = st.sampled_from(["a", "b", *[name for _, name in names]])
    stops_of = st.lists(st.lists(pieces, min_size=1, max_size=4).map("".join), min_size=1, max_size=3)
    ids_of = st.lists(st.sampled_from([*letters, *[token_id for token_id, _ in names]]), max_size=12)

    @settings(max_examples=600, deadline=None)
    @given(ids_of, stops_of, st.booleans())
    def check(ids: list[int], stops: list[str], include: bool) -> None:
        expected = cut_at_items(items(tokenizer, ids), stops, include)
        found, stopped = deltas(tokenizer, ids, stops, include)
        assert ("".join(found), stopped) == expected
        # shown special tokens are text like any other
        stream = TextStream(tokenizer, tuple(stops), include, skip_special_tokens=False)
        shown = "".join([*map(stream.push, ids), stream.flush()])
        assert shown == cut(tokenizer.decode(ids, skip_special_tokens=False), stops, include)

    check()


def test_text_before_a_stop_at_a_special_token_is_held_no_longer_than_it_must():
    tokenizer = default_tokenizer()
    ids = [tokenizer.encode(text)[0] for text in ("a", "b", "<|im_start|>", "b", "<|im_end|>", "c")]
    for stops, expected in [
        (["<|im_start|>"], ["a", "b", "", ""]),
        (["b<|im_end|>"], ["a", "", "", "b", "", ""]),
        (["b<|im_start|>b"], ["a", "", "", "", ""]),
        (["b<|im_start|>c", "x"], ["a", "", "", "b", "", "bc", ""]),
        (["bb"], ["a", "", "", "", ""]),
    ]:
        stream, found = TextStream(tokenizer, tuple(stops)), []
        for token_id in ids:
            found.append(stream.push(token_id))
            if stream.stopped:
                break
        assert [*found, stream.flush()] == expected, stops


def test_streams_do_not_share_state():
    tokenizer = default_tokenizer()
    texts = ["a😀b", "天气", "ab stop cd"]
    streams = [TextStream(tokenizer, ("stop",)) for _ in texts]
    ids = [tokenizer.encode(text) for text in texts]
    sent = [""] * len(texts)
    for position in range(max(map(len, ids))):
        for index, stream in enumerate(streams):
            if position < len(ids[index]):
                sent[index] += stream.push(ids[index][position])
    assert [text + stream.flush() for text, stream in zip(sent, streams, strict=True)] == ["a😀b", "天气", "ab "]
