"""The text of one answer as its tokens come: whole characters only, ended by the first stop string."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvloom.text.tokenizer import Tokenizer


class TextStream:
    """Turns an answer's token ids into deltas that joined are one whole decode, cut at the first stop string.

    A stop string is looked for in the text, wherever its ends lie inside tokens. The one whose last character comes
    first ends the answer (of two that end together, the longer), so the cut does not depend on how the text was split
    into tokens. Text that may yet turn out to be the beginning of a stop string is held back until that is decided.

    Attributes:
        stopped: a stop string was found; whatever is pushed later is ignored.
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
            tokenizer: of the model that answers.
            stop: non-empty stop strings.
            include_stop: keep the stop string as the end of the text.
            skip_special_tokens: special tokens have no text.
        """
        self._detokenizer = tokenizer.new_detokenizer(skip_special_tokens)
        self._searches = [_Search(text) for text in stop]
        self._include_stop = include_stop
        self._held = ""
        self.stopped = False

    def push(self, token_id: int, may_stop: bool = True) -> str:
        """Take the next token and return the text that is certain now, often one token's, sometimes none.

        Text that comes while ``may_stop`` is False is no part of a stop string.
        """
        if self.stopped:
            return ""
        text = self._detokenizer.push(token_id)
        return self._until_stop(text) if may_stop else text

    def flush(self) -> str:
        """Return what was held back, at the end of the answer.

        Bytes that never became a character come out as U+FFFD, as one whole decode gives them. That last text may
        still complete a stop string, so look at ``stopped`` afterwards.
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
    """Looks for one stop string in text that comes in pieces (Knuth, Morris and Pratt, 1977), linear in the text.

    Attributes:
        stop: the string looked for.
        matched: how many characters at the end of the text so far are the beginning of ``stop``, at most.
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
        """Continue with more text; return how much of it was read when the stop string was complete, 0 if it is not."""
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
