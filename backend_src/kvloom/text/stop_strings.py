"""Streams the text of one answer: whole characters only, up to the first stop string."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.text.tokenizer import Tokenizer


class TextStream:
    """Turns an answer's token ids into text deltas. Joined, they equal one decode of all ids, cut at the stop string.

    Stop strings are searched in the text, so they may begin and end inside tokens. The stop string that is complete
    first ends the answer; if two end at the same character, the longer one does. So the cut does not depend on the
    tokenization. Text that may be the beginning of a stop string is held back until the next characters decide.

    Attributes:
        stopped: a stop string was found. Tokens pushed afterwards are ignored.
    """

    __slots__ = ("_detokenizer", "_held", "_include_stop", "_searches", "stopped")

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
        self._searches = [_Search(text) for text in stop]
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
        return self._until_stop(text) if may_stop else text

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

    def _until_stop(self, new: str) -> str:
        if not self._searches or not new:
            return new
        text = self._held + new
        found = [(end, -len(search.stop)) for search in self._searches if (end := search.feed(new))]
        if found:
            end, minus_length = min(found)
            end += len(self._held)
            self._held = ""
            self.stopped = True
            return text[: end if self._include_stop else end + minus_length]
        certain = len(text) - max(search.matched for search in self._searches)
        self._held = text[certain:]
        return text[:certain]


class _Search:
    """Searches text that arrives in pieces for one stop string, in linear time (Knuth, Morris and Pratt, 1977).

    Attributes:
        stop: the stop string.
        matched: length of the longest prefix of ``stop`` that ends the text so far.
    """

    __slots__ = ("_borders", "matched", "stop")

    def __init__(self, stop: str):
        self.stop = stop
        self.matched = 0
        # _borders[n]: length of the longest proper prefix of stop[:n] that is also its suffix
        self._borders = [0, 0]
        border = 0
        for character in stop[1:]:
            while border and character != stop[border]:
                border = self._borders[border]
            border += character == stop[border]
            self._borders.append(border)

    def feed(self, text: str) -> int:
        """Search the next piece. Return the stop string's end in it, or 0 if the stop string is not complete."""
        stop, borders, matched = self.stop, self._borders, self.matched
        if not matched and stop[0] not in text:
            return 0
        for position, character in enumerate(text, 1):
            while matched and character != stop[matched]:
                matched = borders[matched]
            matched += character == stop[matched]
            if matched == len(stop):
                return position
        self.matched = matched
        return 0
