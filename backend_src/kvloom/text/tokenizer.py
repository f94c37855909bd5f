"""A model's tokenizer. It encodes prompts and chats, decodes token ids, and knows the model's BOS and EOS tokens."""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from kvloom.errors import InvalidArgument, ModelError
from kvloom.paths import not_permitted
from kvloom.text import gguf_tokenizer
from kvloom.text.chat import Message
from kvloom.text.chat_template import ChatTemplate
from kvloom.text.detokenizer import detokenizer_factory
from kvloom.text.special_tokens import ChatText, SpecialTokens
from kvloom.text.tokenizer_files import clean_copy

_ANCHORS = ("\n", "0", ".")
"""Texts whose tokens rarely merge with the text that follows."""


class Tokenizer:
    """Wraps a Hugging Face fast tokenizer. Several threads may use it at once.

    Attributes:
        bos_id: the BOS token's id; None if the model has none.
        eos_ids: every id that ends an answer.
        special_tokens: text by id of the tokens that are skipped with ``skip_special_tokens``.
        vocab_size: one more than the largest id; the model's embedding may have more (unused) rows.
        new_detokenizer: makes a :class:`kvloom.text.detokenizer.Detokenizer` for one answer; called with whether
            special tokens are skipped.
    """

    def __init__(
        self,
        hf: PreTrainedTokenizerFast,
        *,
        prefix: Sequence[int],
        eos_ids: Iterable[int],
        chat_special_tokens: bool = False,
    ):
        """Wrap a tokenizer.

        Args:
            hf: the tokenizer, with its chat template.
            prefix: ids that every prompt begins with. For nearly all models they are [BOS] or empty.
            eos_ids: ids that end an answer. The one with which the chat template ends an answer is added.
            chat_special_tokens: special tokens that the text of messages spells are special tokens.

        Raises:
            ModelError: the tokenizer's decoder can't be streamed exactly.
        """
        self._hf = hf
        # hf's own __call__ is not thread-safe: it changes the shared truncation state
        self._backend = hf.backend_tokenizer
        self._prefix = list(prefix)
        self.bos_id: int | None = hf.bos_token_id
        vocabulary = self._backend.get_vocab(with_added_tokens=True)
        self.vocab_size: int = max(vocabulary.values()) + 1
        # A token is at most as long in the text as in the vocabulary, unless a normalizer joins characters (up to 4)
        self._longest_token = max(map(len, vocabulary)) * (4 if self._backend.normalizer is not None else 1)
        self.new_detokenizer = detokenizer_factory(self._backend)
        added = self._backend.get_added_tokens_decoder()
        self._added = frozenset(added)
        self.special_tokens = {
            token_id: token.content for token_id, token in added.items() if token.special and token.content
        }
        longest_first = sorted(self.special_tokens.values(), key=len, reverse=True)
        self._special_token = re.compile(f"({'|'.join(map(re.escape, longest_first)) or '(?!)'})")
        self._template = ChatTemplate(hf)
        self.eos_ids = frozenset(eos_ids) | self._end_of_turn()
        self._special = None if chat_special_tokens else SpecialTokens(self._backend, self._template.turns)
        self._puts_blank_first = self._after_anchor("a", _ANCHORS[0]) != self._plain("a")

    @property
    def identity(self) -> str:
        """A hash of everything that determines token ids, including the chat template."""
        parts = [self._backend.to_str(), str(self._hf.chat_template), str(self._prefix), str(sorted(self.eos_ids))]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()

    @classmethod
    def from_folder(cls, path: str | Path, chat_special_tokens: bool = False) -> "Tokenizer":
        """Load the tokenizer of a Hugging Face model folder, running no code from it.

        How text is cut and merged is what tokenizer.json says. ``AutoTokenizer`` builds it anew for many of the classes
        that a folder may name; it is asked for the names of special tokens and whether prompts begin with BOS.

        An answer ends at the tokenizer's EOS, at the ``eos_token_id`` of generation_config.json and config.json, and at
        the special token with which the chat template ends an answer.
        ``chat_special_tokens``: see ``__init__``.

        Raises:
            ModelError: tokenizer.json is missing, broken or not supported.
        """
        # Imported here because it imports torch, which the rest of this module does not need
        from transformers import AutoTokenizer

        folder = Path(path)
        if not (folder / "tokenizer.json").is_file():
            raise ModelError(
                f"{folder} has no tokenizer.json; convert its tokenizer to the fast format with transformers"
            )
        _read_json(folder / "tokenizer.json")
        eos_ids = _configured_eos_ids(folder)
        try:
            with clean_copy(folder) as copy:
                named = AutoTokenizer.from_pretrained(copy, local_files_only=True, trust_remote_code=False)
                hf = PreTrainedTokenizerFast.from_pretrained(copy, local_files_only=True)
        except PermissionError as error:
            raise not_permitted(error) from error
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ImportError) as error:
            raise ModelError(f"the tokenizer in {folder} can't be loaded: {error}") from error
        if not isinstance(named, PreTrainedTokenizerFast):
            kind = type(named).__name__
            raise ModelError(f"the tokenizer in {folder} is a {kind}; only fast tokenizers are supported")
        for tokenizer in (named, hf):
            # A tokenizer.json may contain settings that are meant for training
            tokenizer.backend_tokenizer.no_truncation()
            tokenizer.backend_tokenizer.no_padding()
        for name, token in named.special_tokens_map.items():
            if getattr(hf, name) is None and hf.backend_tokenizer.token_to_id(token) is not None:
                setattr(hf, name, token)
        if hf.eos_token_id is not None:
            eos_ids.add(hf.eos_token_id)
        return cls(hf, prefix=_prefix(named), eos_ids=eos_ids, chat_special_tokens=chat_special_tokens)

    @classmethod
    def from_gguf(cls, metadata: Mapping[str, Any], chat_special_tokens: bool = False) -> "Tokenizer":
        """Build the tokenizer that a GGUF file's key-value store describes.

        Args:
            metadata: plain Python values by key, those under ``tokenizer.`` at least.
            chat_special_tokens: see ``__init__``.

        Raises:
            ModelError: a key is missing or malformed, or names a tokenizer that is not supported.
        """
        parts = gguf_tokenizer.build(metadata)
        return cls(parts.hf, prefix=parts.prefix, eos_ids=parts.eos_ids, chat_special_tokens=chat_special_tokens)

    def encode(self, text: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a raw prompt.

        They begin with exactly one BOS if the model uses one, even if the text already spells it. No EOS is added.
        Special tokens spelled in the text become special tokens.

        Args:
            text: the prompt.
            max_tokens: a text that must have more tokens is refused before it is tokenized.

        Raises:
            InvalidArgument: the text is empty, too long, or contains half of a surrogate pair.
        """
        if not text:
            raise InvalidArgument("text_input", "must not be empty")
        ids = self._encode(text, "text_input", max_tokens)
        return ids if ids[: len(self._prefix)] == self._prefix else self._prefix + ids

    def encode_piece(self, text: str, field: str, max_tokens: int | None = None) -> list[int]:
        """Token ids of a piece of text without BOS. An empty text has none. ``max_tokens``: see ``encode``.

        Raises:
            InvalidArgument: the text is too long or contains half of a surrogate pair. It names the input ``field``.
        """
        return self._encode(text, field, max_tokens)

    def encode_chat(self, messages: Sequence[Message], max_tokens: int | None = None) -> list[int]:
        """Token ids of a chat up to where the assistant answers: the same as ``apply_chat_template(tokenize=True)``.

        But what the messages themselves say is text, also where it spells special tokens. The template alone decides
        about BOS and EOS, so that nothing is added twice. ``max_tokens``: see ``encode``.

        Raises:
            InvalidArgument: the model has no template, the template refuses the messages, or they are too long or
                contain half of a surrogate pair.
        """
        return self.encode_rendered(self.render_chat(messages), max_tokens)

    def render_chat(self, messages: Sequence[Message], answer: bool = True) -> ChatText:
        """What the chat template makes of messages; with ``answer``, up to where the assistant answers.

        Raises:
            InvalidArgument: the model has no template, or the template refuses the messages.
        """
        text = self._template.render(messages, answer)
        masked = None if self._special is None else self._special.mask(messages, text)
        if self._special is None or masked is None:
            return ChatText(text, text)
        rendered = masked.rendered(self._template.render(masked.messages, answer))
        # where the template has left out what was spelled, as some do with thoughts, it shall see what was said
        forged = self._special.written(rendered.masked) != self._special.written(text)
        return rendered if forged else ChatText(text, text)

    def encode_rendered(self, rendered: str | ChatText, max_tokens: int | None = None) -> list[int]:
        """Token ids of a rendered chat or a part of one: nothing is added. ``max_tokens``: see ``encode``.

        Raises:
            InvalidArgument: the text is too long or contains half of a surrogate pair.
        """
        return self._encode(rendered, "messages", max_tokens)

    def encode_after(
        self, before: int | None, text: str | ChatText, field: str, max_tokens: int | None = None
    ) -> list[int]:
        """Token ids of a piece of text that goes on after the token ``before`` (None: some text), as within one text.

        SentencePiece tokenizers put a space before the text they encode and after every special token. A text that
        continues ordinary text gets no such space here. ``field``: see ``encode_piece``. ``max_tokens``: see
        ``encode``.

        Raises:
            InvalidArgument: the text is too long or contains half of a surrogate pair.
        """
        plain = self._encode(text, field, max_tokens)
        if not self._puts_blank_first or self.begins_anew_after(before):
            return plain
        pieces = (self._after_anchor(text, anchor) for anchor in _ANCHORS)
        return next((ids for ids in pieces if ids is not None), plain)

    def begins_anew_after(self, before: int | None) -> bool:
        """Whether ``encode_after`` encodes a text after this token as it encodes the beginning of a text."""
        return self._puts_blank_first and before in self._added

    def split_at_special(self, text: str) -> list[str]:
        """A text cut at the special tokens that it spells, which are every second piece; others may be empty."""
        return self._special_token.split(text)

    def max_characters(self, tokens: int) -> int:
        """The most characters of text that this many tokens can have."""
        return tokens * self._longest_token

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Text of whole ids. Unknown ids are skipped; spaces before punctuation are never "cleaned up"."""
        detokenizer = self.new_detokenizer(skip_special_tokens)
        return "".join([*map(detokenizer.push, ids), detokenizer.flush()])

    def _end_of_turn(self) -> set[int]:
        """The special token with which the chat template ends an answer. Many models' configs do not name it."""
        end = self._special_token.match(self._template.after_answer().lstrip())
        return {token_id for token_id, text in self.special_tokens.items() if end is not None and text == end[0]}

    def _encode(self, said: str | ChatText, field: str, max_tokens: int | None = None) -> list[int]:
        text = said if isinstance(said, str) else said.text
        if max_tokens is not None and len(text) > self.max_characters(max_tokens):
            raise InvalidArgument(field, f"has {len(text)} characters; that can't fit context_length {max_tokens}")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            half = f"U+{ord(text[error.start]):04X}"
            raise InvalidArgument(
                field, f"character {error.start} is {half}, half of a surrogate pair; send valid Unicode"
            ) from error
        return self._plain(said)

    def _after_anchor(self, text: str | ChatText, anchor: str) -> list[int] | None:
        """Token ids of a text without what the tokenizer puts first; None where the anchor grows together with it."""
        start = self._plain(anchor)
        ids = self._plain(anchor + text if isinstance(text, str) else text.after(anchor))
        return ids[len(start) :] if ids[: len(start)] == start else None

    def _plain(self, text: str | ChatText) -> list[int]:
        if isinstance(text, ChatText):
            if self._special is not None and self._special.misread(text):
                return self._special.encode(text)
            text = text.text
        # unlike encode(), lets other Python threads run meanwhile
        return self._backend.encode_batch_fast([text], add_special_tokens=False)[0].ids


def _prefix(hf: PreTrainedTokenizerFast) -> list[int]:
    """The ids that the tokenizer puts before a text, found by encoding one."""
    plain = hf.backend_tokenizer.encode("a", add_special_tokens=False).ids
    full = hf.backend_tokenizer.encode("a", add_special_tokens=True).ids
    for start in range(len(full) + 1):
        if full[start : start + len(plain)] == plain:
            return full[:start]
    raise ModelError("the tokenizer's post-processor changes the text's own tokens, which is not supported")


def _configured_eos_ids(folder: Path) -> set[int]:
    ids: set[int] = set()
    for name in ("generation_config.json", "config.json"):
        if not (folder / name).is_file():
            continue
        config = _read_json(folder / name)
        value = config.get("eos_token_id") if isinstance(config, dict) else None
        values = value if isinstance(value, list) else [] if value is None else [value]
        if any(type(token_id) is not int for token_id in values):
            raise ModelError(f"{folder / name}: eos_token_id={value!r} must be an integer or a list of integers")
        ids.update(values)
    return ids


def _read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8-sig"))
    except PermissionError as error:
        raise not_permitted(error) from error
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} can't be read: {error}") from error
