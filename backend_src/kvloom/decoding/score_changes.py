"""Tracks the edits of a sequence's logits before its next token is chosen: bias, penalties and bans."""

from collections.abc import Iterable, Sequence

import numpy as np
import torch

from kvloom.ops.penalties import Edits
from kvloom.request import SamplingParams

_BIAS, _REPETITION, _SUBTRACTED = range(3)


class ScoreChanges:
    """The edits of one answer, with one entry per affected token. Each step adds its token.

    Entries are unique and never removed. Tokens with a bias come first, then the prompt's tokens if there is a
    repetition penalty, then other tokens as they appear.

    Args:
        params: the request's parameters.
        prompt: the request's prompt.
        vocab: the number of scores. Larger ids in ``params``, the prompt or bans have no effect.
    """

    def __init__(self, params: SamplingParams, prompt: Sequence[int], vocab: int):
        self._params = params
        self._vocab = vocab
        self._counting = bool(params.presence_penalty or params.frequency_penalty)
        self._following = self._counting or params.repetition_penalty != 1
        bias = {token: value for token, value in params.logit_bias.items() if token < vocab}
        repeated = dict.fromkeys(prompt) if params.repetition_penalty != 1 else {}
        seen = {token: None for token in repeated if token < vocab}
        self._entries = {token: entry for entry, token in enumerate(bias | seen)}
        self._known = len(prompt)
        self.size = len(self._entries)
        self._tokens = np.fromiter(self._entries, np.int64, self.size)
        self._values = np.tile(_neutral(), self.size)
        self._counts = np.zeros(self.size, np.int64)
        self._values[_BIAS, : len(bias)] = list(bias.values())
        if seen:
            penalized = np.fromiter((token in seen for token in self._entries), np.bool_, self.size)
            self._values[_REPETITION, penalized] = params.repetition_penalty

    @property
    def tokens(self) -> np.ndarray:
        """The token of each entry, int64 [size]."""
        return self._tokens[: self.size]

    @property
    def values(self) -> np.ndarray:
        """The bias, repetition penalty and subtracted value of each entry, fp64 [3, size]; see ``Edits``."""
        return self._values[:, : self.size]

    def follow(self, tokens: list[int]) -> None:
        """Count the tokens since the last call. ``tokens`` are prompt and answer together, and only ever grow."""
        assert len(tokens) >= self._known
        if self._following:
            for token in tokens[self._known :]:
                entry = self.entry(token)
                self._values[_REPETITION, entry] = self._params.repetition_penalty
                if self._counting:
                    self._counts[entry] += 1
                    self._values[_SUBTRACTED, entry] = (
                        self._params.presence_penalty + self._counts[entry] * self._params.frequency_penalty
                    )
        self._known = len(tokens)

    def entry(self, token: int) -> int:
        """The entry of a token. A new entry has no effect yet."""
        entry = self._entries.setdefault(token, self.size)
        if entry == self.size:
            if self.size == len(self._tokens):
                self._grow()
            self._tokens[entry] = token
            self.size += 1
        return entry

    def banned_entries(self, tokens: Iterable[int]) -> list[int]:
        """The entries of tokens that may not come next."""
        return [self.entry(token) for token in tokens if token < self._vocab]

    def _grow(self) -> None:
        more = max(64, self.size)
        self._tokens = np.concatenate([self._tokens, np.zeros(more, np.int64)])
        self._values = np.concatenate([self._values, np.tile(_neutral(), more)], axis=1)
        self._counts = np.concatenate([self._counts, np.zeros(more, np.int64)])


def join(rows: dict[int, tuple[ScoreChanges, list[int]]], vocab: int) -> Edits:
    """Join the edits of several rows of scores [R, vocab].

    Args:
        rows: by row: its changes and the entries that are banned in this step.
        vocab: the number of scores in a row.
    """
    changes = [change for change, _ in rows.values()]
    sizes = [change.size for change in changes]
    index = np.concatenate([change.tokens for change in changes])
    index += np.repeat(np.fromiter(rows, np.int64, len(rows)) * vocab, sizes)
    values = np.concatenate([change.values for change in changes], axis=1)
    banned = np.zeros(len(index), np.bool_)
    start = 0
    for change, entries in rows.values():
        if entries:
            banned[start + np.array(entries)] = True
        start += change.size
    bias, repetition, subtracted = map(torch.from_numpy, values)
    return Edits(torch.from_numpy(index), bias, repetition, subtracted, torch.from_numpy(banned))


def _neutral() -> np.ndarray:
    """The values, fp64 [3, 1], of an entry without effect."""
    neutral = np.zeros((3, 1))
    neutral[_REPETITION] = 1
    return neutral
