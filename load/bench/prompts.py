"""Prompts: pieces of English text with unique beginnings."""

import random
from collections.abc import Sequence
from pydoc_data.topics import topics

from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom.text.tokenizer import Tokenizer

BEGINNING = 8
"""Number of tokens in which all prompts differ. No engine's prefix cache shares so few tokens."""


class PromptSource:
    """Generates prompts, never with the same beginning twice. The same seed gives the same prompts.

    The text is the language reference that is part of Python (``pydoc_data.topics``), as token ids.
    """

    def __init__(self, tokens: Sequence[int], seed: int = 0):
        self._tokens = tokens
        self._random = random.Random(seed)
        self._seen: set[tuple[int, ...]] = set()

    @classmethod
    def default(cls, seed: int = 0) -> "PromptSource":
        """A source of this text for the default model."""
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
