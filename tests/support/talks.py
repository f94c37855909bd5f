"""Conversations with an engine without Triton, which the test steps."""

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kvloom.conversation.registry import ConversationId, Turn
from kvloom.request import Request, SamplingParams, Sequence
from kvloom.scheduling.offloader import Costs
from support.block_rig import ALWAYS_SWAP
from support.engine_driver import Answer, Driver


class Triton:
    """Records the calls to Triton."""

    def __init__(self) -> None:
        self.told: list[tuple[str, ConversationId]] = []

    def end(self, conversation: ConversationId) -> None:
        self.told.append(("end", conversation))

    def start(self, conversation: ConversationId) -> None:
        self.told.append(("start", conversation))

    def taken(self, conversation: ConversationId) -> None:
        self.told.append(("taken", conversation))


class Talks(Driver):
    """A driver of conversations.

    Attributes:
        triton: records the calls to Triton.
    """

    def __init__(self, model: Path, **settings: object):
        self.triton = Triton()
        super().__init__(model, self.triton, **settings)

    @property
    def turns(self) -> Any:
        return self.engine.turns

    def turn(
        self,
        conversation: ConversationId,
        ids: Iterable[int] = (),
        *,
        start: bool = False,
        end: bool = False,
        messages: list[dict[str, str]] | None = None,
        text: str = "",
        kv: dict[str, object] | None = None,
        salt: str = "",
        deadline: float | None = None,
        request_id: str = "",
        retain_s: float = 0.0,
        **params: object,
    ) -> Answer:
        """Send a turn, prepared as in serving. ``params`` are sampling parameters; the default is greedy."""
        rendered = ""
        if messages is not None and start:
            chat = self.tokenizer.render_chat(messages)
            ids, rendered = self.tokenizer.encode_rendered(chat), chat.text
        if text:
            ids = self.tokenizer.encode(text) if start else self.tokenizer.encode_after(None, text, "text_input")
        request = Request(
            id=request_id,
            prompt_ids=tuple(ids),
            params=SamplingParams.model_validate({"temperature": 0.0, "ignore_eos": True, "max_tokens": 8, **params}),
            arrival=time.monotonic(),
            cache_salt=salt,
            deadline=deadline,
            retain_s=retain_s,
        )
        answer = Answer()
        answer.sequence = Sequence(request)
        later = "" if start else text
        turn = Turn(conversation, answer.sequence, answer.append, start, end, messages, rendered, later, kv)
        self.engine.prepare(turn)
        self.turns.submit(turn)
        return answer

    def say(self, conversation: ConversationId, *args: Any, **fields: Any) -> Answer:
        """Send a turn and run until the engine has nothing to do."""
        answer = self.turn(conversation, *args, **fields)
        self.run_all()
        return answer

    def run_all(self, most: int = 10_000) -> None:
        for _ in range(most):
            if not self.engine.busy:
                break
            self.engine.step()
            self.engine.check_invariants()
        self.engine.check_invariants()
        assert not self.engine.busy

    def end_all(self) -> None:
        """End every conversation, and check that nothing is held."""
        for conversation in [conversation.id for conversation in self.turns.manager.registry]:
            self.turns.manager.end(conversation, lambda: None)
        self.run_all()
        self.assert_idle()
        assert self.engine.stats().blocks_swapped == 0


def talks(model: Path, costs: Costs = ALWAYS_SWAP, **settings: Any) -> Talks:
    made = Talks(model, **{"kv_blocks": 256, **settings})
    made.engine._scheduler._offloader._costs = costs
    return made
