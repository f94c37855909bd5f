"""Decodes token ids to text, one token at a time. The joined texts equal one decode of all ids.

There is one small class for each supported decoder of ``tokenizers.Tokenizer``. Loading a model with any other decoder
fails: no decoder is approximated.
"""

import codecs
import json
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tokenizers import Tokenizer as Backend

from kvloom.errors import ModelError

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


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
        byte_pieces = {
            skip: [None if token is None else _byte_level_bytes(token) for token in tokens]
            for skip, tokens in tables.items()
        }
        return lambda skip_special: ByteLevelDetokenizer(byte_pieces[skip_special])
    if steps[:3] == _SENTENCEPIECE and steps[3:] in ([], [_STRIP]):
        pieces = {
            skip: [None if token is None else _sentencepiece_piece(token) for token in tokens]
            for skip, tokens in tables.items()
        }
        return lambda skip_special: SentencePieceDetokenizer(pieces[skip_special], strip=bool(steps[3:]))
    names = " + ".join(step["type"] for step in steps) or "none"
    raise ModelError(
        f"tokenizer decoder {names} is not supported; supported: ByteLevel, and SentencePiece's "
        f"Replace(\N{LOWER ONE EIGHTH BLOCK}, space) + ByteFallback + Fuse with or without Strip(space, 1)"
    )


class ByteLevelDetokenizer:
    """Byte-level BPE: a token is a few bytes, and the text is the UTF-8 decoding of all bytes.

    Python's incremental decoder replaces each maximal ill-formed part by one U+FFFD. Unicode recommends that (Unicode
    16, section 3.9), and ``tokenizers`` does the same in Rust. It holds back a character whose bytes are incomplete.
    """

    __slots__ = ("_pieces", "_utf8")

    def __init__(self, pieces: Sequence[bytes | None]):
        self._pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else None
        return self._utf8.decode(piece) if piece else ""

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._utf8.decode(b"", True)


class SentencePieceDetokenizer:
    """SentencePiece with byte fallback: a token is text, or one byte of a character that is not in the vocabulary.

    As in ``tokenizers``, a run of byte tokens that is not valid UTF-8 as a whole becomes one U+FFFD per byte. So a
    run's text is held back until the run ends.
    """

    __slots__ = ("_pieces", "_run", "_strip")

    def __init__(self, pieces: Sequence[str | int | None], strip: bool):
        self._pieces = pieces
        self._run = bytearray()
        self._strip = strip

    def push(self, token_id: int) -> str:
        """See :class:`Detokenizer`."""
        piece = self._pieces[token_id] if token_id < len(self._pieces) else None
        if piece is None:  # ``tokenizers`` drops such tokens before decoding, so they don't end a run
            return ""
        if isinstance(piece, int):
            self._run.append(piece)
            return ""
        return self._without_first_space(self._end_run() + piece if self._run else piece)

    def flush(self) -> str:
        """See :class:`Detokenizer`."""
        return self._without_first_space(self._end_run())

    def _end_run(self) -> str:
        run = bytes(self._run)
        self._run.clear()
        try:
            return run.decode()
        except UnicodeDecodeError:
            return _REPLACEMENT * len(run)

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
    except KeyError:  # as in ``tokenizers``, an added token may be spelled as plain text
        return token.encode()


def _sentencepiece_piece(token: str) -> str | int:
    byte = _BYTE_TOKEN.fullmatch(token)
    return int(byte[1], 16) if byte else token.replace("\N{LOWER ONE EIGHTH BLOCK}", " ")
