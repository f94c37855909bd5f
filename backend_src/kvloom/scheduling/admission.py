"""What the engine takes: what is refused for ever, and what just now."""

from collections.abc import Collection
from dataclasses import dataclass

from kvloom.errors import InvalidArgument, Unavailable
from kvloom.kv.cache import BlockCache
from kvloom.request import Request, Sequence
from kvloom.scheduling.scheduler import Scheduler


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What the engine takes.

    Attributes:
        context_length: longest sequence, prompt and answer, in tokens.
        vocab_size: ids that the model has an embedding for.
        max_queue: maximum number of requests waiting, beside those that may run at once.
        kv_dtype: name of the cache's dtype, for usage.
        queue_timeout_s: longest wait for the first step; 0: for ever.
        max_conversations: maximum number of conversations, without those of one turn.
        conversation_idle_s: how long a conversation may be idle; 0: for ever.
        fail_after_tokens: requests whose id begins with ``test-fail`` fail after so many tokens; 0 is off.
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
        """Refuse a prompt of so many tokens that does not fit.

        Raises:
            InvalidArgument: it is longer than the context, less a token for the answer.
        """
        if tokens > self.context_length - 1:
            raise InvalidArgument(
                "prompt",
                f"has {tokens} tokens; context_length {self.context_length} takes at most {self.context_length - 1}",
            )


class Admission:
    """Says of a request whether it can be served. Changes nothing.

    Args:
        limits: of the engine.
        cache: which has to hold it.
        scheduler: where it would wait.
    """

    def __init__(self, limits: EngineLimits, cache: BlockCache, scheduler: Scheduler):
        self._limits = limits
        self._cache = cache
        self._scheduler = scheduler

    def check(self, request: Request) -> None:
        """Refuse what can never be served. Reads nothing that changes, so any thread may ask.

        Raises:
            InvalidArgument: of the prompt, see ``check_prompt``; or so much is never retained.
        """
        self.check_prompt(request.prompt_ids)
        if not request.retain_s:
            return
        blocks, limit = len(request.prompt_ids) // self._cache.block_size, self._cache.retain_limit
        if not limit:
            raise InvalidArgument("kv.retain_s", "this server retains nothing; its setting retain_memory is off")
        if blocks > limit:
            raise InvalidArgument("kv.retain_s", f"the prompt fills {blocks} blocks; retain_memory holds {limit}")

    def check_prompt(self, ids: Collection[int]) -> None:
        """Refuse a prompt, with the conversation before it, that can never be served.

        Raises:
            InvalidArgument: it is empty, does not fit the context or the pool, or has a token that the model lacks.
        """
        tokens = len(ids)
        if tokens == 0:
            raise InvalidArgument("prompt", "is empty; send at least one token")
        self._limits.check_length(tokens)
        capacity = self._cache.total * self._cache.block_size
        if tokens > capacity:
            raise InvalidArgument("prompt", f"has {tokens} tokens; the whole KV cache holds {capacity}")
        # a tokenizer may have more tokens than the model's embedding has rows
        largest = max(ids)
        if largest >= self._limits.vocab_size:
            raise InvalidArgument(
                "prompt", f"token {largest} has no embedding; ids are 0 to {self._limits.vocab_size - 1}"
            )

    def queue_refusal(self, also_waiting: int) -> Unavailable | None:
        """Why no request can be taken just now; ``also_waiting`` wait outside of the scheduler."""
        # a burst arrives between two steps: those that the next one lets in do not count as waiting
        if len(self._scheduler.waiting) + also_waiting >= self._limits.max_queue + self._scheduler.free_places:
            return Unavailable(f"queue full: {self._limits.max_queue} requests are waiting")
        return None

    def retain_refusal(self, sequence: Sequence) -> Unavailable | None:
        """Why the prompt can't be retained just now.

        It is asked for a conversation's first turn. What a later one adds is retained as far as there is room: it goes
        on with what the first one was granted, and its answer does not depend on it.
        """
        if sequence.request.retain_s:
            pinned, blocks = self._cache.pinned(), len(sequence.tokens) // self._cache.block_size
            new = blocks - self._cache.pinned_of(sequence.namespace, sequence.tokens)
            if pinned + new > self._cache.retain_limit:
                return Unavailable(
                    f"retain_memory full: {pinned} of {self._cache.retain_limit} blocks are pinned, the prompt fills "
                    f"{new} others; unpin all with the control op flush"
                )
        return None
