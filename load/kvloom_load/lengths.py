"""How long prompts and answers are: distributions in a JSON file."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FILE = Path(__file__).with_name("lengths.json")


@dataclass(frozen=True)
class Lengths:
    """Numbers of tokens and how often each occurs.

    Attributes:
        tokens: the lengths there are.
        weights: how often each is drawn, relative to the others.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.choices(self.tokens, self.weights)[0]


@dataclass(frozen=True)
class Kind:
    """One kind of request: how long its prompts and its answers are."""

    prompt: Lengths
    output: Lengths


def read_kinds(file: Path) -> Mapping[str, Kind]:
    """The kinds of requests in a file: name to ``{"prompt": {"tokens": [...], "weights": [...]}, "output": ...}``.

    Raises:
        ValueError: the file says something else.
    """
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
        return {name: Kind(_lengths(kind["prompt"]), _lengths(kind["output"])) for name, kind in content.items()}
    except (KeyError, TypeError, AttributeError, ValueError) as error:
        raise ValueError(f"{file}: not a file of lengths: {error!r}") from error


def _lengths(content: Mapping[str, list[float]]) -> Lengths:
    tokens, weights = content["tokens"], content["weights"]
    if not tokens or len(tokens) != len(weights) or min(tokens) < 1:
        raise ValueError("tokens and weights must be lists of one length, tokens at least 1")
    return Lengths(tuple(int(length) for length in tokens), tuple(weights))
