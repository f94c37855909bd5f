"""Which special tokens of a chat the template wrote, and which are only spelled by a client's text."""

import re
import secrets
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as Backend

from kvloom.errors import InvalidArgument

_BEGINNING = 3
"""So many characters are taken for the beginning of a special token: a template may cut or join what follows them."""

_STAND_INS = range(0x2800, 0xD800)
"""Characters for ``ChatText.masked``: printable, without case and no blanks, so that a template treats them alike."""


@dataclass(frozen=True, slots=True)
class ChatText:
    """A rendered chat, or a part of one.

    Attributes:
        text: the chat.
        masked: the same, with another character wherever a client's text begins to spell a special token: whatever is
            a special token in here was written by the template. Like ``text`` where it makes no difference.
    """

    text: str
    masked: str

    def since(self, characters: int) -> "ChatText":
        """What comes after so many characters."""
        return ChatText(self.text[characters:], self.masked[characters:])

    def after(self, text: str) -> "ChatText":
        """The same behind some text."""
        return ChatText(text + self.text, text + self.masked)


@dataclass(frozen=True, slots=True)
class MaskedMessages:
    """Messages in which nothing spells a special token, as a template shall see them.

    Attributes:
        messages: likewise.
        originals: the character that each stand-in's code stands for.
    """

    messages: list[dict[str, Any]]
    originals: dict[int, str]

    def rendered(self, text: str) -> ChatText:
        """What ``text``, which a template has made of them, says."""
        return ChatText(text.translate(self.originals), text)


class SpecialTokens:
    """The special tokens that nobody but a chat template may write. Safe to use from several threads.

    Args:
        backend: the tokenizer; not changed afterwards.
        turns: a chat that the template wrote. The added tokens in it are special, too, whatever the tokenizer's file
            says of them.
    """

    def __init__(self, backend: Backend, turns: str):
        added = backend.get_added_tokens_decoder()
        special = {
            token.content: token_id
            for token_id, token in added.items()
            if token.content.strip() and (token.special or token.content in turns and not token.content.isalnum())
        }
        self._spellings = {token_id: text for text, token_id in special.items()}
        self._written = _any_of(sorted(map(re.escape, special), key=len, reverse=True))
        self._beginnings = _any_of(_beginnings(special))
        # Another tokenizer of the same model, to which they are text. How it spells them nobody can guess.
        nonce = secrets.token_hex(8)
        self._names = {text: f"\ue000{nonce} {token_id}\ue001" for text, token_id in special.items()}
        self._of_text = Backend(backend.model)
        self._normalize: Callable[[str], str] | None = None
        if backend.normalizer is not None:
            self._of_text.normalizer = backend.normalizer
            if any(added[token_id].normalized for token_id in special.values()):
                self._normalize = backend.normalizer.normalize_str
        if backend.pre_tokenizer is not None:
            self._of_text.pre_tokenizer = backend.pre_tokenizer
        vocabulary = backend.get_vocab(with_added_tokens=False)
        unused = max(vocabulary.values(), default=-1) + 1 - len(vocabulary)
        known = {self._names.get(token.content, token.content): token_id for token_id, token in added.items()}
        self._of_text.add_tokens(
            [AddedToken(f"\ue000{nonce} gap {number}\ue001", normalized=False) for number in range(unused)]
            + [
                AddedToken(
                    name,
                    lstrip=added[token_id].lstrip,
                    rstrip=added[token_id].rstrip,
                    single_word=added[token_id].single_word,
                    normalized=added[token_id].normalized and name == added[token_id].content,
                )
                for name, token_id in known.items()
            ]
        )
        again = self._of_text.get_added_tokens_decoder()
        self._ids = {token_id: known[token.content] for token_id, token in again.items() if token.content in known}

    def mask(self, messages: Sequence[dict[str, Any]], rendered: str) -> MaskedMessages | None:
        """Messages that spell no special token; None where they don't anyway.

        Args:
            messages: JSON objects; whatever text is in them, keys included, is a client's.
            rendered: what the template makes of them.

        Raises:
            InvalidArgument: they hold more different characters than any language has.
        """
        found = {match[0] for text in _texts(list(messages)) for match in self._beginnings.finditer(text)}
        if not found:
            return None
        used = set(rendered).union(*_texts(list(messages)))
        free = (chr(code) for code in _STAND_INS if chr(code) not in used)
        stand_ins = dict(zip(sorted(found), free, strict=False))
        if len(stand_ins) < len(found):
            raise InvalidArgument("messages", "spell special tokens and hold nearly every character that there is")

        def masked(value: Any) -> Any:
            if isinstance(value, str):
                return self._beginnings.sub(lambda match: stand_ins[match[0]], value)
            if isinstance(value, dict):
                return {masked(key): masked(item) for key, item in value.items()}
            return [masked(item) for item in value] if isinstance(value, list) else value

        return MaskedMessages(masked(list(messages)), {ord(stand_in): text for text, stand_in in stand_ins.items()})

    def written(self, text: str) -> list[str]:
        """The special tokens in a text, in their order."""
        return self._written.findall(text)

    def misread(self, chat: ChatText) -> bool:
        """Whether the tokenizer as it is may take text of a chat for special tokens."""
        if chat.masked != chat.text:
            return True
        if self._normalize is None:
            return False
        # they are looked for behind a normalizer, which may make them of look-alikes
        return len(self.written(self._normalize(chat.text))) > len(self.written(chat.text))

    def encode(self, chat: ChatText) -> list[int]:
        """Token ids of a chat in which special tokens are those that the template wrote.

        Raises:
            InvalidArgument: the tokenizer makes a special token of text that only spells it.
        """
        parts, end = [], 0
        for match in self._written.finditer(chat.masked):
            parts += [chat.text[end : match.start()], self._names[match[0]]]
            end = match.end()
        text = "".join([*parts, chat.text[end:]])
        ids = self._of_text.encode_batch_fast([text], add_special_tokens=False)[0].ids
        unwanted = next((one for one in ids if one in self._spellings and one not in self._ids), None)
        if unwanted is not None:
            raise InvalidArgument(
                "messages", f"spell {self._spellings[unwanted]!r}, which this model's tokenizer can't write as text"
            )
        return [self._ids.get(token_id, token_id) for token_id in ids]


def _texts(value: Any) -> Iterator[str]:
    """Every text in a JSON value."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _texts(item)
    elif isinstance(value, list):
        for item in value:
            yield from _texts(item)


def _beginnings(special: Iterable[str]) -> list[str]:
    """Patterns of the first character of whatever may become one of these texts."""
    patterns: set[str] = set()
    ways: dict[str, set[str]] = {}
    for text in special:
        first, *rest = map(re.escape, text[:_BEGINNING])
        if text[0].isalnum() or text[0].isspace():
            # a beginning like that is in every other word
            patterns.add(f"{first}(?={re.escape(text[1:])})")
            continue
        # a template may take blanks out of a text, and what ends one may go on in the next
        ends = [[*rest[:length], "$"] for length in range(len(rest))]
        ways.setdefault(first, set()).update(r"\s*".join(parts) for parts in [rest, *ends])
    # a literal first: a huge text is searched with others waiting
    patterns |= {rf"{first}(?=(?i:\s*(?:{'|'.join(sorted(after))})))" for first, after in ways.items()}
    return sorted(patterns)


def _any_of(patterns: Iterable[str]) -> re.Pattern[str]:
    return re.compile("|".join(patterns) or "(?!)")
