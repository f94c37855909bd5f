"""Parses the README.md files: fenced blocks with their commands, tables, links."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = sorted(path for path in (ROOT / "README.md", *ROOT.glob("[!.]*/**/README.md")) if "build" not in path.parts)
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in FILES}
"""Each README's text, by its path in the repository."""

_FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block.

    Attributes:
        readme: the README's path in the repository.
        line: the line of its first fence.
        language: the language after the fence; may be empty.
        text: the text between the fences.
    """

    readme: str
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.readme}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """The commands of a console block, each on one line, without comments."""
        found = re.findall(r"^\$ ((?:.*\\\n)*.*)$", self.text, re.MULTILINE)
        return [re.sub(r"\s+#\s.*", "", re.sub(r"\\\n\s*", "", command)).strip() for command in found]


BLOCKS = [
    Block(readme, text[: found.start()].count("\n") + 1, found[1], found[2])
    for readme, text in TEXTS.items()
    for found in _FENCED.finditer(text)
]


def commands() -> Iterator[tuple[Block, str]]:
    """Every command of every console block."""
    return ((block, command) for block in BLOCKS if block.language == "console" for command in block.commands)


def table(*header: str) -> list[list[str]]:
    """The rows of the only table in all READMEs whose header begins with these cells."""
    pattern = r"^\| " + r" \| ".join(map(re.escape, header)) + r" \|.*\n\|[-|]+\n((?:\|.*\n)+)"
    [rows] = [found for text in TEXTS.values() for found in re.findall(pattern, text + "\n", re.MULTILINE)]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in rows.splitlines()]


def names(cell: str) -> list[str]:
    """The names in backticks in a cell."""
    return re.findall(r"`(\w+)`", cell)


def links() -> Iterator[tuple[str, str]]:
    """Every link to a file in the repository, with its README."""
    for readme, text in TEXTS.items():
        for target in re.findall(r"\]\(([^)\s]+)\)", _FENCED.sub("", text)):
            if "://" not in target:
                yield readme, target


def anchors(path: Path) -> set[str]:
    """The anchors of a Markdown file."""
    headings = re.findall(r"^#+ (.*)$", _FENCED.sub("", path.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", heading.lower()).replace(" ", "-") for heading in headings}
