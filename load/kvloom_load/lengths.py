"""Distributions of the lengths of prompts and answers, from a JSON file."""

import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

DEFAULT_FILE = Path(__file__).with_name("lengths.json")


@dataclass(frozen=True)
class Lengths:
    """A distribution of lengths.

    Attributes:
        tokens: the possible lengths in tokens.
        weights: the relative probability of each.
    """

    tokens: tuple[int, ...]
    weights: tuple[float, ...]

    def draw(self, rng: random.Random) -> int:
        """Draw a length."""
        return rng.choices(self.tokens, self.weights)[0]


@dataclass(frozen=True)
class Kind:
    """A kind of requests: the lengths of its prompts and answers."""

    prompt: Lengths
    output: Lengths


def read_kinds(file: Path) -> Mapping[str, Kind]:
    """Read kinds from a file: ``{NAME: {"prompt": {"tokens": [...], "weights": [...]}, "output": {...}}, ...}``.

    Raises:
        ValueError: the file does not have this form.
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
