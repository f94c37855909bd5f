"""Checks requests against the engine's limits. Some can never be served, others not at the moment."""

from collections.abc import Collection
from dataclasses import dataclass

from kvloom.errors import InvalidArgument, Unavailable
from kvloom.kv.cache import BlockCache
from kvloom.request import Request, Sequence
from kvloom.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """The engine's limits.

    Attributes:
        context_length: longest sequence, prompt and answer together, in tokens.
        vocab_size: number of rows of the model's embedding.
        max_queue: maximum number of waiting requests. Requests that can start at once don't count.
        kv_dtype: name of the cache's dtype, for usage.
        queue_timeout_s: longest wait for the first step; 0 means no limit.
        max_conversations: maximum number of conversations. Those of a single turn don't count.
        conversation_idle_s: how long a conversation may be idle; 0 means no limit.
        fail_after_tokens: for tests: requests with an id that begins with ``test-fail`` fail after this many tokens.
            0 is off.
    """

    context_length: int
    vocab_size: int
    max_queue: int
    kv_dtype: str
    queue_timeout_s: float = 0.0
    max_conversations: int = 1024
    conversation_idle_s: float = 0.0
    fail_after_tokens: int = 0

    def check_length(self, tokens: int) -> None:
        """Refuse a prompt of ``tokens`` tokens if it does not fit the context.

        Raises:
            InvalidArgument: the prompt leaves no room for a token of the answer.
        """
        if tokens > self.context_length - 1:
            raise InvalidArgument(
                "prompt",
                f"has {tokens} tokens; context_length {self.context_length} takes at most {self.context_length - 1}",
            )


class Admission:
    """Checks whether a request can be served. Changes nothing.

    Args:
        limits: the engine's limits.
        cache: the device's block pool.
        scheduler: the scheduler, which holds the queue.
    """

    def __init__(self, limits: EngineLimits, cache: BlockCache, scheduler: Scheduler):
        self._limits = limits
        self._cache = cache
        self._scheduler = scheduler

    def check(self, request: Request) -> None:
        """Refuse a request that can never be served. Reads only constants, so any thread may call it.

        Raises:
            InvalidArgument: the prompt can't be served, see ``check_prompt``; or it can't be retained.
        """
        self.check_prompt(request.prompt_ids)
        if not request.retain_s:
            return
        blocks, limit = len(request.prompt_ids) // self._cache.block_size, self._cache.retain_limit
        if not limit:
            raise InvalidArgument("kv.retain_s", "this server retains nothing, because its setting retain_memory is 0")
        if blocks > limit:
            raise InvalidArgument("kv.retain_s", f"the prompt fills {blocks} blocks; retain_memory holds {limit}")

    def check_prompt(self, ids: Collection[int]) -> None:
        """Refuse a prompt that can never be served. ``ids`` include the conversation before it.

        Raises:
            InvalidArgument: the prompt is empty, does not fit the context or the block pool, or has a token without an
                embedding.
        """
        tokens = len(ids)
        if tokens == 0:
            raise InvalidArgument("prompt", "is empty; send at least one token")
        self._limits.check_length(tokens)
        capacity = self._cache.total * self._cache.block_size
        if tokens > capacity:
            raise InvalidArgument("prompt", f"has {tokens} tokens; the whole KV cache holds {capacity}")
        # A tokenizer may have more tokens than the model's embedding has rows
        largest = max(ids)
        if largest >= self._limits.vocab_size:
            raise InvalidArgument(
                "prompt", f"token {largest} has no embedding; ids are 0 to {self._limits.vocab_size - 1}"
            )

    def queue_refusal(self, also_waiting: int) -> Unavailable | None:
        """The error for a new request if the queue is full. ``also_waiting`` requests wait outside of the scheduler."""
        # A burst arrives between two steps: requests that the next step admits don't count as waiting
        if len(self._scheduler.waiting) + also_waiting >= self._limits.max_queue + self._scheduler.free_places:
            return Unavailable(f"queue full: {self._limits.max_queue} requests are waiting")
        return None

    def retain_refusal(self, sequence: Sequence) -> Unavailable | None:
        """The error for a prompt that can't be retained at the moment, because too many blocks are pinned.

        It is for a conversation's first turn. Later turns are never refused for this: their blocks are retained if
        there is room.
        """
        if sequence.request.retain_s:
            pinned, blocks = self._cache.pinned(), len(sequence.tokens) // self._cache.block_size
            new = blocks - self._cache.pinned_of(sequence.namespace, sequence.tokens)
            if pinned + new > self._cache.retain_limit:
                return Unavailable(
                    f"retain_memory full: {pinned} of {self._cache.retain_limit} blocks are pinned, and the prompt "
                    f"needs {new} more; unpin all with the control op flush"
                )
        return None
