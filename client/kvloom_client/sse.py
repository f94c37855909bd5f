"""Parses server-sent events. Does no input or output."""

import re
from collections.abc import Iterable, Iterator

# The bytes are split into lines before they are decoded, because a read may split a character. str.splitlines, and so
# httpx's iter_lines, would also split at U+2028 and similar characters, which JSON allows inside strings. A carriage
# return at the end of a read is kept for the next read, because a line feed may follow.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")


class EventParser:
    """Parses a stream's bytes as they arrive, in parts of any size."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of every event that these bytes complete, without comments and other fields."""
        *lines, self._rest = _LINE_END.split(self._rest + received)
        complete = []
        for line in lines:
            if line:
                self._take(line.decode("utf-8", errors="replace"))
            elif self._data:
                complete.append("\n".join(self._data))
                self._data = []
        return complete

    def _take(self, line: str) -> None:
        name, _, value = line.partition(":")
        if name == "data":
            self._data.append(value.removeprefix(" "))


def events(received: Iterable[bytes]) -> Iterator[str]:
    """The data of each event of a stream. An incomplete event at the end is dropped, as the standard requires."""
    parser = EventParser()
    for part in received:
        yield from parser.feed(part)
