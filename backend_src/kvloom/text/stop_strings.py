"""Streams the text of one answer: whole characters only, up to the first stop string."""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.text.tokenizer import Tokenizer


_TOKEN = "\0token "
"""Before the text of a special token that does not appear in an answer's text."""


class TextStream:
    """Turns an answer's token ids into text deltas. Joined, they equal one decode of all ids, cut at the stop string.

    Stop strings are searched in the text, so they may begin and end inside tokens. The stop string that is complete
    first ends the answer; if two end at the same character, the longer one does. So the cut does not depend on the
    tokenization. Text that may be the beginning of a stop string is held back until the next characters decide.

    Special tokens without text are found by a stop string that spells them, and count for no other.

    Attributes:
        stopped: a stop string was found. Tokens pushed afterwards are ignored.
    """

    __slots__ = ("_detokenizer", "_held", "_hidden", "_include_stop", "_searches", "stopped")

    def __init__(
        self,
        tokenizer: "Tokenizer",
        stop: tuple[str, ...] = (),
        include_stop: bool = False,
        *,
        skip_special_tokens: bool = True,
    ):
        """Start an answer.

        Args:
            tokenizer: the model's tokenizer.
            stop: non-empty stop strings.
            include_stop: the text ends with the stop string instead of before it.
            skip_special_tokens: leave special tokens out of the text.
        """
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens)
        self._searches = [_Search(text, text) for text in stop]
        self._hidden: Mapping[int, str] = {}
        spelling = [text for text in stop if len(tokenizer.split_at_special(text)) > 1] if skip_special_tokens else []
        if spelling:
            self._hidden = tokenizer.special_tokens
            self._searches += [_Search(text, _parts(tokenizer.split_at_special(text))) for text in spelling]
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take the next token and return the text that can no longer change; it may be empty.

        Text pushed with ``may_stop=False`` is never part of a stop string.
        """
        if self.stopped:
            return ""
        text = self._detokenizer.push(token_id)
        if not may_stop:
            return text
        return self._until_stop(text, self._hidden.get(token_id))

    def flush(self) -> str:
        """End the answer and return the text still held back.

        Incomplete characters become U+FFFD, as in one decode of all ids. This last text may complete a stop string, so
        check ``stopped`` afterwards.
        """
        if self.stopped:
            return ""
        text = self._until_stop(self._detokenizer.flush())
        if not self.stopped:
            text += self._held
            self._held = ""
        return text

    def _until_stop(self, new: str, hidden: str | None = None) -> str:
        """Continue with some text, or with a special token that has none."""
        if not self._searches or not (new or hidden is not None):
            return new
        text = self._held + new
        found = []
        for search in self._searches:
            if hidden is None:
                read = search.feed(new)
                if read:
                    found.append((len(self._held) + read, search))
            elif search.spells_tokens and search.feed((_TOKEN + hidden,)):
                found.append((len(self._held), search))
        if found:
            end, search = min(found, key=lambda one: (one[0], -one[1].length, -len(one[1].stop)))
            self._held = ""
            self.stopped = True
            return text[: end - search.length] + (search.stop if self._include_stop else "")
        certain = len(text) - max(search.held for search in self._searches)
        self._held = text[certain:]
        return text[:certain]


class _Search:
    """Searches text that arrives in pieces for one stop string, in linear time (Knuth, Morris and Pratt, 1977).

    Attributes:
        stop: the string looked for.
        spells_tokens: some of it are special tokens that have no text.
        length: how many characters of it have.
    """

    __slots__ = ("_borders", "_characters", "_matched", "_parts", "length", "spells_tokens", "stop")

    def __init__(self, stop: str, parts: Sequence[str]):
        """Look for ``stop``; ``parts`` are its characters, and special tokens in it as one each."""
        self.stop = stop
        self._parts = parts
        self._matched = 0
        # [n]: how many of parts[:n] are characters
        self._characters = list(accumulate((len(part) == 1 for part in parts), initial=0))
        self.length = self._characters[-1]
        self.spells_tokens = self.length < len(parts)
        # [n]: length of the longest proper prefix of parts[:n] that is also its suffix
        self._borders = [0, 0]
        border = 0
        for part in parts[1:]:
            while border and part != parts[border]:
                border = self._borders[border]
            border += part == parts[border]
            self._borders.append(border)

    @property
    def held(self) -> int:
        """How many characters at the end of the text so far are the beginning of ``stop``, at most."""
        return self._characters[self._matched]

    def feed(self, text: Sequence[str]) -> int:
        """Continue with more parts; return how many were read when the stop string was complete, 0 if it is not."""
        parts, borders, matched = self._parts, self._borders, self._matched
        if not matched and parts[0] not in text:
            return 0
        for position, character in enumerate(text, 1):
            while matched and character != parts[matched]:
                matched = borders[matched]
            matched += character == parts[matched]
            if matched == len(parts):
                return position
        self._matched = matched
        return 0


def _parts(pieces: Sequence[str]) -> list[str]:
    """Characters and special tokens of a text; every second piece of it is a special token."""
    parts: list[str] = []
    for number, piece in enumerate(pieces):
        parts += [_TOKEN + piece] if number % 2 else piece
    return parts
