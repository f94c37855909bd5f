"""Server-sent events: bytes to the data of each event. No input or output here."""

import re
from collections.abc import Iterable, Iterator

# Lines are cut out of the bytes and decoded whole: a character may be split over reads, and str.splitlines (so also
# httpx's iter_lines) would cut at U+2028 and its like, which JSON allows inside strings. A carriage return at the end
# of a read waits for the next one, to see whether a line feed follows.
_LINE_END = re.compile(rb"\r\n|\n|\r(?=[\s\S])")


class EventParser:
    """Takes a stream's bytes as they arrive, however they are cut."""

    def __init__(self) -> None:
        self._rest = b""
        self._data: list[str] = []

    def feed(self, received: bytes) -> list[str]:
        """The data of every event that is complete now; comments and other fields are left out."""
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
    """The data of each event of a stream. An event that the stream's end cuts off is dropped, as the standard says."""
    parser = EventParser()
    for part in received:
        yield from parser.feed(part)
