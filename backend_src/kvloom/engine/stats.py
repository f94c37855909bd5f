"""A snapshot of the engine for metrics."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of the engine. Counters count from its start."""

    running: int = 0
    waiting: int = 0
    conversations: int = 0
    blocks_free: int = 0
    blocks_used: int = 0
    blocks_cached: int = 0
    blocks_swapped: int = 0
    swaps: int = 0
    recomputes: int = 0
    prefix_queried: int = 0
    prefix_hit: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    finished: Mapping[str, int] = field(default_factory=dict)
