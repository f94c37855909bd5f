"""Prompts: pieces of English text, each with a beginning that no other one has."""

import random
from collections.abc import Sequence
from pydoc_data.topics import topics

from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom.text.tokenizer import Tokenizer

BEGINNING = 8
"""Tokens that tell two prompts apart: fewer than any engine's prefix cache shares."""


class PromptSource:
    """Deals out prompts, never the same beginning twice; the same seed deals the same ones.

    The text is the language reference that every Python carries (``pydoc_data.topics``), as token ids.
    """

    def __init__(self, tokens: Sequence[int], seed: int = 0):
        self._tokens = tokens
        self._random = random.Random(seed)
        self._seen: set[tuple[int, ...]] = set()

    @classmethod
    def default(cls, seed: int = 0) -> "PromptSource":
        """Of the text above, for the default model."""
        text = " ".join(" ".join(topics[name].split()) for name in sorted(topics))
        return cls(Tokenizer.from_gguf(GgufFile(default_model()).metadata).encode(text), seed)

    def take(self, count: int, length: int) -> list[list[int]]:
        """``count`` prompts of ``length`` tokens."""
        prompts: list[list[int]] = []
        while len(prompts) < count:
            start = self._random.randrange(len(self._tokens) - length)
            prompt = list(self._tokens[start : start + length])
            beginning = tuple(prompt[:BEGINNING])
            if beginning not in self._seen:
                self._seen.add(beginning)
                prompts.append(prompt)
        return prompts
