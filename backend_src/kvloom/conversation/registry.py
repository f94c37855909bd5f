"""Which conversations there are, and what each is made of. Plain data, used by the engine thread only."""

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
"""As clients name it; 7 and "7" are two conversations."""

Loss = Literal["expired", "evicted", "lost"]
"""Why a conversation is gone though nobody ended it: idle for too long, others needed its place, a fault."""

MAX_DROPPED = 1024
"""Dropped conversations whose clients have not heard of it yet that are remembered."""


@dataclass(eq=False, slots=True)
class Turn:
    """One request to a conversation.

    Attributes:
        conversation: its id.
        sequence: the request; its prompt is what is new, until its turn has come.
        sink: where its deltas go.
        start: it begins the conversation.
        end: nothing follows it.
        messages: the new messages, where the prompt is of that kind.
        rendered: for a start with messages: what the template made of them.
        text: for a later turn of raw text: that text. The prompt is what it is after ordinary text, which need not be
            how the turn before it ends.
        kv: what it asks of the cache; None where it leaves that to the conversation's first turn.
        answered: it ended before its turn came.
        new: what it adds, or why it can't; None: that is not known yet.
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
    """The turn of a conversation that has no other: a request without a conversation."""
    return Turn(uuid.uuid4().hex, Sequence(request), sink, start=True, end=True)


@dataclass(eq=False, slots=True)
class Conversation:
    """A Triton sequence as the engine keeps it.

    Attributes:
        id: its name.
        salt: its cache salt.
        retain_s: how long prompts' blocks are kept, see ``Request``.
        kv: what its first turn asked of the cache.
        history: token ids fed and generated, up to the last turn that finished.
        held: what is computed of ``history``, between two turns.
        chat: the conversation as messages; None where some turn was none.
        running: the turn that is at work.
        new: what it has added to the history.
        queue: those that follow it.
        preparing: the first of these, while it is found out what it adds.
        counted: it may last longer than one turn.
        ending: nothing follows what is queued.
        open_in_triton: Triton still knows its id.
        detached: its id belongs to another conversation by now.
        last_used: when it became idle (``time.monotonic()``).
        on_end: called when it has ended.
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
    """Finds conversations by id, and the idle ones by when they were used last.

    Args:
        max_conversations: how many there may be, without those of one turn.
        idle_s: how long one may be idle; 0: for ever.
    """

    def __init__(self, max_conversations: int, idle_s: float):
        self._max_conversations = max_conversations
        self._idle_s = idle_s
        self._live: dict[ConversationId, Conversation] = {}
        # those without an id of their own, until they are over
        self._detached: dict[Conversation, None] = {}
        self._counted = 0
        # the least recently used first
        self._idle: OrderedDict[Conversation, None] = OrderedDict()
        self._dropped: OrderedDict[ConversationId, Loss] = OrderedDict()

    def __len__(self) -> int:
        return self._counted

    def __iter__(self) -> Iterator[Conversation]:
        return iter(self._live.values())

    def get(self, conversation: ConversationId) -> Conversation | None:
        """The conversation of that id."""
        return self._live.get(conversation)

    def knows(self, conversation: ConversationId) -> bool:
        """Whether there is one of that id, or a client that has yet to hear that there is none any more."""
        return conversation in self._live or conversation in self._dropped

    def find(self, conversation: ConversationId) -> Conversation:
        """The conversation of that id.

        Raises:
            NotFound: there is none; says why, if it was dropped.
        """
        found = self._live.get(conversation)
        if found is None:
            raise NotFound(f"conversation {conversation}: {self._dropped.get(conversation, 'unknown')}")
        return found

    def room(self) -> Conversation | None:
        """Who has to go before there may be one more; None: nobody.

        Raises:
            Unavailable: nobody can go.
        """
        if self._counted < self._max_conversations:
            return None
        oldest = next(iter(self._idle), None)
        if oldest is None:
            raise Unavailable(f"max_conversations: all {self._max_conversations} conversations are busy")
        return oldest

    def add(self, conversation: Conversation) -> None:
        """A new one; its id is free. It is not idle."""
        assert conversation.id not in self._live
        self._live[conversation.id] = conversation
        self._counted += conversation.counted
        self._dropped.pop(conversation.id, None)

    def detach(self, conversation: Conversation) -> None:
        """Its id is another's from now on."""
        self.remove(conversation)
        conversation.detached = True
        self._detached[conversation] = None

    def remove(self, conversation: Conversation) -> None:
        """It is over."""
        if conversation.detached:
            del self._detached[conversation]
            return
        del self._live[conversation.id]
        self._counted -= conversation.counted
        self._idle.pop(conversation, None)

    def everyone(self) -> list[Conversation]:
        """All that are not over, with an id or without."""
        return [*self, *self._detached]

    def rest(self, conversation: Conversation, now: float) -> None:
        """It is idle from now on."""
        conversation.last_used = now
        self._idle[conversation] = None

    def wake(self, conversation: Conversation) -> None:
        """It is not idle any more."""
        self._idle.pop(conversation, None)

    def resting(self, conversation: Conversation) -> bool:
        """Whether it is idle."""
        return conversation in self._idle

    def expired(self, now: float) -> list[Conversation]:
        """Those that were idle for too long."""
        found = []
        for conversation in self._idle:
            if not self._idle_s or conversation.last_used + self._idle_s > now:
                break
            found.append(conversation)
        return found

    @property
    def next_expiry(self) -> float:
        """When ``expired`` finds something next (``time.monotonic()``); infinite: not before something changes."""
        oldest = next(iter(self._idle), None)
        return oldest.last_used + self._idle_s if oldest is not None and self._idle_s else float("inf")

    def remember(self, conversation: ConversationId, loss: Loss) -> ConversationId | None:
        """Its next turn shall hear why it is gone; returns an id that is not remembered any longer, if there is one."""
        self._dropped[conversation] = loss
        self._dropped.move_to_end(conversation)
        return self._dropped.popitem(last=False)[0] if len(self._dropped) > MAX_DROPPED else None

    def forget(self, conversation: ConversationId) -> None:
        """A client has heard that it is gone."""
        self._dropped.pop(conversation, None)

    def check(self) -> None:
        """Assert that it all fits together."""
        assert (
            self._counted
            == sum(conversation.counted for conversation in self._live.values())
            <= self._max_conversations
        )
        assert not self._live.keys() & self._dropped.keys(), "a conversation is live and dropped"
        for conversation in self._live.values():
            assert (conversation in self._idle) == (not conversation.busy), f"{conversation.id}: idle or busy?"
        assert all(self._live.get(conversation.id) is conversation for conversation in self._idle)
        assert all(one.detached and one.busy for one in self._detached), "one without an id is stuck"
        for conversation in self.everyone():
            at_work = conversation.running or conversation.preparing
            assert at_work is not None or not conversation.queue, f"{conversation.id}: a turn is stuck"
            assert conversation.preparing in (None, *list(conversation.queue)[:1]), f"{conversation.id}: not the next"
