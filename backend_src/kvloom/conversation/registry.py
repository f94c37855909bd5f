"""The conversations of the engine, by id. Plain data; only the engine thread uses it."""

import uuid
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from kvloom.conversation.continuation import ChatHistory, Continuation
from kvloom.errors import NotFound, Unavailable
from kvloom.request import KvState, Request, Sequence, Sink

if TYPE_CHECKING:
    from kvloom.text.chat import Message

ConversationId = int | str
"""An id that a client has chosen. 7 and "7" are two conversations."""

Loss = Literal["expired", "evicted", "lost"]
"""Why a conversation was dropped: it was idle for too long, another one needed its place, or a fault."""

MAX_DROPPED = 1024
"""The maximum number of dropped conversations that are remembered, to tell their clients why."""


@dataclass(eq=False, slots=True)
class Turn:
    """One request to a conversation.

    Attributes:
        conversation: the conversation's id.
        sequence: the request's sequence. Until the turn begins, its prompt is only the new part.
        sink: receives its deltas.
        start: whether it starts the conversation.
        end: whether it is the conversation's last turn.
        messages: the new messages; None for raw text.
        rendered: the rendered messages, if it starts the conversation.
        text: the raw text, if it is a later turn. The sequence's prompt holds its tokens as they are after ordinary
            text, which the conversation need not end with.
        kv: its options for the KV cache; None for those of the conversation's first turn.
        answered: whether its final delta was sent before it began.
        new: the tokens that it adds, or the error if there are none; None until it is prepared.
    """

    conversation: ConversationId
    sequence: Sequence
    sink: Sink
    start: bool = False
    end: bool = False
    messages: "list[Message] | None" = None
    rendered: str = ""
    text: str = ""
    kv: dict[str, object] | None = None
    answered: bool = False
    new: Continuation | Exception | None = None


def only_turn(request: Request, sink: Sink) -> Turn:
    """The only turn of a conversation, for a request without a conversation id."""
    return Turn(uuid.uuid4().hex, Sequence(request), sink, start=True, end=True)


@dataclass(eq=False, slots=True)
class Conversation:
    """A conversation: the engine's side of a Triton sequence.

    Attributes:
        id: its id.
        salt: its cache salt.
        retain_s: how long its prompts' blocks are retained, see ``Request``.
        kv: the KV cache options of its first turn.
        history: its token ids, prompts and answers, up to the last finished turn.
        held: the KV state of ``history`` between two turns.
        chat: the conversation as messages; None if a turn was raw text.
        running: the turn that runs.
        new: the tokens that the running turn has added.
        queue: the turns that wait.
        preparing: the first of these, while another thread prepares it.
        counted: whether it counts towards ``max_conversations``. A conversation of only one turn does not.
        ending: whether it takes no more turns.
        open_in_triton: whether its sequence in Triton is open.
        detached: whether another conversation has taken over its id.
        last_used: when it became idle (``time.monotonic()``).
        on_end: functions to call when it has ended.
    """

    id: ConversationId
    salt: str = ""
    retain_s: float = 0.0
    kv: dict[str, object] | None = None
    history: "array[int]" = field(default_factory=lambda: array("i"))
    held: KvState = field(default_factory=KvState)
    chat: ChatHistory | None = None
    running: Turn | None = None
    new: Continuation = field(default_factory=lambda: Continuation(0, []))
    queue: deque[Turn] = field(default_factory=deque)
    preparing: Turn | None = None
    counted: bool = True
    ending: bool = False
    open_in_triton: bool = True
    detached: bool = False
    last_used: float = 0.0
    on_end: list[Callable[[], None]] = field(default_factory=list)

    @property
    def busy(self) -> bool:
        """Whether a turn runs or waits."""
        return self.running is not None or bool(self.queue)


class ConversationRegistry:
    """Finds conversations by id, and idle ones by their last use.

    Args:
        max_conversations: the maximum number of conversations, not counting those of one turn.
        idle_s: how many seconds a conversation may be idle; 0 for no limit.
    """

    def __init__(self, max_conversations: int, idle_s: float):
        self._max_conversations = max_conversations
        self._idle_s = idle_s
        self._live: dict[ConversationId, Conversation] = {}
        # Conversations whose id was taken over and that have not ended yet
        self._detached: dict[Conversation, None] = {}
        self._counted = 0
        # The least recently used comes first
        self._idle: OrderedDict[Conversation, None] = OrderedDict()
        self._dropped: OrderedDict[ConversationId, Loss] = OrderedDict()

    def __len__(self) -> int:
        return self._counted

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._live.values())

    def get(self, conversation: ConversationId) -> Conversation | None:
        """The conversation with this id; None if there is none."""
        return self._live.get(conversation)

    def knows(self, conversation: ConversationId) -> bool:
        """Whether there is a conversation with this id, or one was dropped and its client has not been told yet."""
        return conversation in self._live or conversation in self._dropped

    def find(self, conversation: ConversationId) -> Conversation:
        """The conversation with this id.

        Raises:
            NotFound: there is none. If it was dropped, the message says why.
        """
        found = self._live.get(conversation)
        if found is None:
            raise NotFound(f"conversation {conversation}: {self._dropped.get(conversation, 'unknown')}")
        return found

    def room(self) -> Conversation | None:
        """The conversation to drop before another one can be added; None if there is room.

        Raises:
            Unavailable: there is no room and no conversation is idle.
        """
        if self._counted < self._max_conversations:
            return None
        oldest = next(iter(self._idle), None)
        if oldest is None:
            raise Unavailable(f"max_conversations: all {self._max_conversations} conversations are busy")
        return oldest

    def add(self, conversation: Conversation) -> None:
        """Add a conversation that is not idle. Its id must be free."""
        assert conversation.id not in self._live
        self._live[conversation.id] = conversation
        self._counted += conversation.counted
        self._dropped.pop(conversation.id, None)

    def detach(self, conversation: Conversation) -> None:
        """Take a conversation's id away, for another conversation."""
        self.remove(conversation)
        conversation.detached = True
        self._detached[conversation] = None

    def remove(self, conversation: Conversation) -> None:
        """Remove a conversation that has ended."""
        if conversation.detached:
            del self._detached[conversation]
            return
        del self._live[conversation.id]
        self._counted -= conversation.counted
        self._idle.pop(conversation, None)

    def everyone(self) -> list[Conversation]:
        """All conversations that have not ended, including detached ones."""
        return [*self, *self._detached]

    def rest(self, conversation: Conversation, now: float) -> None:
        """Mark a conversation as idle since ``now``."""
        conversation.last_used = now
        self._idle[conversation] = None

    def wake(self, conversation: Conversation) -> None:
        """Mark a conversation as not idle."""
        self._idle.pop(conversation, None)

    def resting(self, conversation: Conversation) -> bool:
        """Whether a conversation is idle."""
        return conversation in self._idle

    def expired(self, now: float) -> list[Conversation]:
        """The conversations that have been idle for too long."""
        found = []
        for conversation in self._idle:
            if not self._idle_s or conversation.last_used + self._idle_s > now:
                break
            found.append(conversation)
        return found

    @property
    def next_expiry(self) -> float:
        """When the next conversation expires (``time.monotonic()``); infinite if none does."""
        oldest = next(iter(self._idle), None)
        return oldest.last_used + self._idle_s if oldest is not None and self._idle_s else float("inf")

    def remember(self, conversation: ConversationId, loss: Loss) -> ConversationId | None:
        """Remember why a conversation was dropped, for the error of its next turn.

        Returns:
            The id that had to be forgotten for it; None if there was room.
        """
        self._dropped[conversation] = loss
        self._dropped.move_to_end(conversation)
        return self._dropped.popitem(last=False)[0] if len(self._dropped) > MAX_DROPPED else None

    def forget(self, conversation: ConversationId) -> None:
        """Forget why a conversation was dropped."""
        self._dropped.pop(conversation, None)

    def check(self) -> None:
        """Assert the registry's invariants."""
        assert (
            self._counted
            == sum(conversation.counted for conversation in self._live.values())
            <= self._max_conversations
        )
        assert not self._live.keys() & self._dropped.keys(), "a conversation is live and dropped"
        for conversation in self._live.values():
            assert (conversation in self._idle) == (not conversation.busy), f"{conversation.id}: idle or busy?"
        assert all(self._live.get(conversation.id) is conversation for conversation in self._idle)
        assert all(one.detached and one.busy for one in self._detached), "a detached conversation is stuck"
        for conversation in self.everyone():
            at_work = conversation.running or conversation.preparing
            assert at_work is not None or not conversation.queue, f"{conversation.id}: a turn is stuck"
            assert conversation.preparing in (None, *list(conversation.queue)[:1]), f"{conversation.id}: not the next"
