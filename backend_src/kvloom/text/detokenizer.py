"""Token ids to text, one token at a time.

The joined texts are what ``tokenizers.Tokenizer.decode`` makes of all the ids, but for what it spoils: a run of byte
tokens that is no UTF-8 as a whole (each of its bytes becomes U+FFFD there; here a character is text as soon as its last
byte has come), and added tokens that happen to be spelled in GPT-2's alphabet of bytes. A kind of decoder that is not
known here is refused when the model is loaded, never approximated.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from kvloom.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Detokenizer(Protocol):
    """Decodes one answer token by token."""

    def push(self, token_id: int) -> str:
        """Take the next token. Return the text that can no longer change (whole characters only)."""
        ...

    def flush(self) -> str:
        """End the answer and return the text still held back. Incomplete characters become U+FFFD."""
        ...


def detokenizer_factory(backend: Backend) -> Callable[[bool], Detokenizer]:
    """Prepare a tokenizer's decoding tables once.

    Returns:
        A function that makes the detokenizer of one answer. Its argument says whether special tokens are skipped.

    Raises:
        ModelError: the tokenizer's decoder can't be streamed exactly.
    """
    tables = {skip_special: _spellings(backend, skip_special) for skip_special in (True, False)}
    decoder = json.loads(backend.to_str())["decoder"] if backend.decoder is not None else None
    steps = _flatten(decoder)
    if [step["type"] for step in steps] == ["ByteLevel"]:
        own = backend.get_vocab(with_added_tokens=False)
        added = {
            token.content
            for token in backend.get_added_tokens_decoder().values()
            # one letter of the vocabulary is the byte that it spells, which many other characters need
            if len(token.content) > 1 or token.content not in own
        }
        pieces = {
            skip: [
                None if token is None else token.encode() if token in added else _byte_level_bytes(token)
                for token in tokens
            ]
            for skip, tokens in tables.items()
        }
        return lambda skip_special: _Utf8Detokenizer(pieces[skip_special])
    if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP]):
        pieces = {
            skip: [None if token is None else _sentencepiece_bytes(token) for token in tokens]
            for skip, tokens in tables.items()
        }
        return lambda skip_special: _Utf8Detokenizer(pieces[skip_special], strip=bool(steps[3:]))
    names = " + ".join(step["type"] for step in steps) or "none"
    raise ModelError(
        f"tokenizer decoder {names} is not supported; supported: ByteLevel, and SentencePiece's "
        f"Replace(\N{LOWER ONE EIGHTH BLOCK}, space) + ByteFallback + Fuse with or without Strip(space, 1)"
    )


class _Utf8Detokenizer:
    """A token is some bytes, the text is their UTF-8, undecodable bytes replaced.

    Python's incremental decoder replaces each maximal ill-formed part by one U+FFFD. Unicode recommends that (Unicode
    16, section 3.9), and ``tokenizers`` does the same in Rust. It holds back a character whose bytes are incomplete.
    """

    __slots__ = ("_pieces", "_strip", "_utf8")

    def __init__(self, pieces: Sequence[bytes | None], strip: bool = False):
        """Start an answer.

        Args:
            pieces: the bytes of every id; None: it is skipped.
            strip: leave out one blank at the beginning of the text.
        """
        self._pieces = pieces
        self._strip = strip
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else None
        return self._without_first_space(self._utf8.decode(piece)) if piece else ""

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._without_first_space(self._utf8.decode(b"", True))

    def _without_first_space(self, text: str) -> str:
        if self._strip and text:
            self._strip = False
            return text.removeprefix(" ")
        return text


_SENTENCEPIECE: list[dict[str, Any]] = [
    {"type": "Replace", "pattern": {"String": "\N{LOWER ONE EIGHTH BLOCK}"}, "content": " "},
    {"type": "ByteFallback"},
    {"type": "Fuse"},
]
_STRIP = {"type": "Strip", "content": " ", "start": 1, "stop": 0}


def _flatten(decoder: dict[str, Any] | None) -> list[dict[str, Any]]:
    if decoder is None:
        return []
    if decoder["type"] == "Sequence":
        return [step for inner in decoder["decoders"] for step in _flatten(inner)]
    return [decoder]


def _spellings(backend: Backend, skip_special: bool) -> list[str | None]:
    """The spelling of every id. None for unused ids and, with ``skip_special``, for special tokens."""
    added = backend.get_added_tokens_decoder().values() if skip_special else ()
    special = {token.content for token in added if token.special}
    vocabulary = backend.get_vocab(with_added_tokens=True)
    tokens: list[str | None] = [None] * (max(vocabulary.values(), default=-1) + 1)
    for token, token_id in vocabulary.items():
        if token not in special:
            tokens[token_id] = token
    return tokens


def _byte_alphabet() -> dict[str, int]:
    """The byte for each of GPT-2's printable characters: the inverse of ``bytes_to_unicode`` in GPT-2's encoder.py."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF = _byte_alphabet()


def _byte_level_bytes(token: str) -> bytes:
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:  # spelled as plain text: it stands for itself, as in ``tokenizers``
        return token.encode()


def _sentencepiece_bytes(token: str) -> bytes:
    byte = _BYTE_TOKEN.fullmatch(token)
    return bytes([int(byte[1], 16)]) if byte else token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ").encode()
