"""Logits to tokens: the parameters of a step's rows, batched."""

import numpy as np
import torch

from kvloom.ops.sampling import greedy, sample
from kvloom.request import Sequence


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """A uniform number in [0, 1) per row from its seed and the position of the token to draw.

    Output number ``position`` of the SplitMix64 generator (Steele et al., 2014): no state to keep, so a draw depends
    on neither the neighbours nor what was recomputed.

    Args:
        seeds: uint64 [R].
        positions: uint64 [R].

    Returns:
        float64 [R].
    """
    z = seeds + (positions + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z ^= z >> np.uint64(31)
    return (z >> np.uint64(11)).astype(np.float64) * 2.0**-53


def choose(logits: torch.Tensor, sequences: list[Sequence]) -> list[int]:
    """The next token of each sequence.

    Args:
        logits: fp32 [R, vocab], a row per sequence.
        sequences: R sequences whose known tokens are all computed.
    """
    params = [sequence.request.params for sequence in sequences]
    tokens = greedy(logits)
    drawn = [row for row, p in enumerate(params) if p.temperature > 0]
    if drawn:
        vocab = logits.shape[1]
        rows = torch.tensor(drawn)
        seeds = np.array([sequences[row].seed for row in drawn], dtype=np.uint64)
        positions = np.array([len(sequences[row].tokens) for row in drawn], dtype=np.uint64)
        tokens[rows] = sample(
            logits[rows],
            torch.tensor([params[row].temperature for row in drawn]),
            torch.tensor([params[row].top_k if params[row].top_k > 0 else vocab for row in drawn]),
            torch.tensor([params[row].top_p or 1.0 for row in drawn]),
            torch.from_numpy(uniforms(seeds, positions)),
        )
    return tokens.tolist()
