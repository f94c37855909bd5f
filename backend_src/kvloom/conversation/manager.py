"""Conversations from their start to their end, told to Triton and to the journal. Used by the engine thread only."""

import time
from array import array
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Protocol

from kvloom.conversation.journal import Journal
from kvloom.conversation.registry import Conversation, ConversationId, ConversationRegistry, Loss
from kvloom.errors import NotFound
from kvloom.scheduling.scheduler import Scheduler

if TYPE_CHECKING:
    from kvloom.text.chat import Message


class Triton(Protocol):
    """Triton's own idea of which sequences there are. Each call returns at once."""

    def end(self, conversation: ConversationId) -> None:
        """Let Triton forget an id."""

    def start(self, conversation: ConversationId) -> None:
        """Let Triton know an id."""

    def taken(self, conversation: ConversationId) -> None:
        """A client has started a conversation of this id: what was to be done about an earlier one no longer is."""


class Post(Protocol):
    """Makes calls in order, after the deltas that were sent before; maybe later, when they are delivered."""

    def __call__(self, *calls: Callable[[], None]) -> None:
        """Make these, too."""


class NoTriton:
    """Stands for Triton where there is none."""

    def end(self, conversation: ConversationId) -> None:
        """Nothing to forget."""

    def start(self, conversation: ConversationId) -> None:
        """Nobody to know."""

    def taken(self, conversation: ConversationId) -> None:
        """Nothing to undo."""


class ConversationManager:
    """Begins, restores, drops and ends conversations. Their turns are not its business.

    Args:
        scheduler: keeps what is computed of them.
        registry: finds them; empty.
        triton: hears which ids it shall know.
        journal: keeps histories for an engine after this one; None: nobody does.
        post: the way to clients and to Triton: nobody shall hear of an end before its last delta.

    Attributes:
        registry: finds them.
    """

    def __init__(
        self, scheduler: Scheduler, registry: ConversationRegistry, triton: Triton, journal: Journal | None, post: Post
    ):
        self.registry = registry
        self._scheduler = scheduler
        self._triton = triton
        self._journal = journal
        self._post = post

    def restore(self) -> None:
        """Take over what an earlier engine left in the journal, and let Triton know of it."""
        if self._journal is None:
            return
        now = time.monotonic()
        for found in self._journal.read():
            if found.history:
                conversation = Conversation(
                    found.id, found.salt, found.retain_s, found.kv, found.history, chat=found.chat
                )
                self._make_room()
                self.registry.add(conversation)
                self.registry.rest(conversation, now)
            else:
                # its first turn was running, or it was another model's
                self._journal.forget(found.id)
                self._remember(found.id, "lost")
            self._tell(self._triton.start, found.id)

    def make_way(self, conversation_id: ConversationId, counted: bool) -> Conversation | None:
        """Free an id for a new conversation, and a place, unless it is not ``counted``.

        Returns:
            Who had the id: it goes on without one if it is not over yet.

        Raises:
            Unavailable: there is no place; all is as before.
        """
        old = self.registry.get(conversation_id)
        if counted and (old is None or not old.counted):
            self._make_room()
        if old is not None:
            self.registry.detach(old)
            self._erase(old)
        return old

    def begin(self, conversation: Conversation) -> None:
        """A client has started a conversation, whose id is free."""
        if self._journal is not None and conversation.counted:
            self._journal.begin(conversation)
        self.registry.add(conversation)
        self._tell(self._triton.taken, conversation.id)

    def record(self, conversation: Conversation, before: "array[int]", said: "list[Message] | None") -> None:
        """A turn has finished; the arguments are those of ``Journal.add``."""
        if self._journal is not None and conversation.counted and not conversation.detached:
            self._journal.add(conversation, before, said)

    def continued(self, conversation_id: ConversationId) -> Conversation:
        """The conversation that a turn goes on with.

        Raises:
            NotFound: there is none, or it is ending; the client hears of it.
        """
        try:
            conversation = self.registry.find(conversation_id)
        except NotFound:
            # what the client is about to hear; without an end flag Triton's sequence is ended by `refused`
            self.registry.forget(conversation_id)
            raise
        if conversation.ending:
            raise NotFound(f"conversation {conversation_id}: ended by an earlier request")
        return conversation

    def end(self, conversation_id: ConversationId, done: Callable[[], None]) -> None:
        """End a conversation after its queued turns; ``done`` is called then.

        Raises:
            NotFound: there is no such conversation.
        """
        try:
            conversation = self.registry.find(conversation_id)
        except NotFound:
            if self.registry.knows(conversation_id):
                self.registry.forget(conversation_id)
                self._tell(self._triton.end, conversation_id)
            raise
        conversation.on_end.append(done)
        conversation.ending = True
        if not conversation.busy:
            self.close(conversation)

    def close(self, conversation: Conversation) -> None:
        """A conversation is over: free what it holds."""
        try:
            self.registry.remove(conversation)
            if not conversation.detached:
                self._erase(conversation)
            self._scheduler.discard(conversation.held)
        finally:
            # nobody waits for ever, whatever fails in here
            known = conversation.open_in_triton and not conversation.detached
            self._post(*([partial(self._triton.end, conversation.id)] if known else []), *conversation.on_end)

    def expire(self, now: float) -> None:
        """Drop the conversations that were idle for too long."""
        for conversation in self.registry.expired(now):
            self._drop(conversation, "expired")

    def refused(self, conversation_id: ConversationId, end: bool) -> None:
        """A request to this id got an error, and nothing else has come of it; ``end`` was its flag."""
        if end:
            self.ended_in_triton(conversation_id)
        elif not self.registry.knows(conversation_id):
            # a refused start leaves Triton's sequence begun
            self._tell(self._triton.end, conversation_id)

    def ended_in_triton(self, conversation_id: ConversationId) -> None:
        """A client has ended this id in Triton: what is left of the conversation ends with it."""
        self.registry.forget(conversation_id)
        conversation = self.registry.get(conversation_id)
        if conversation is not None:
            conversation.open_in_triton = False
            self.end(conversation_id, lambda: None)

    def began_in_triton(self, conversation_id: ConversationId) -> None:
        """Triton has a sequence of this id, by a request that begins no conversation: without one it is ended again."""
        if not self.registry.knows(conversation_id):
            self._tell(self._triton.end, conversation_id)

    def forgotten_by_triton(self, conversation_id: ConversationId) -> None:
        """Triton has just ended this id for us; a client may have started it meanwhile."""
        if self.registry.knows(conversation_id):
            self._tell(self._triton.start, conversation_id)

    def _tell(self, what: Callable[[ConversationId], None], conversation_id: ConversationId) -> None:
        """Call one of Triton's functions."""
        self._post(partial(what, conversation_id))

    def _make_room(self) -> None:
        """See to it that there may be one conversation more."""
        oldest = self.registry.room()
        if oldest is not None:
            self._drop(oldest, "evicted")

    def _drop(self, conversation: Conversation, loss: Loss) -> None:
        """End an idle conversation that nobody ended; its client hears of it with its next turn."""
        conversation.open_in_triton = False
        self.close(conversation)
        self._remember(conversation.id, loss)

    def _remember(self, conversation_id: ConversationId, loss: Loss) -> None:
        forgotten = self.registry.remember(conversation_id, loss)
        if forgotten is not None:
            self._tell(self._triton.end, forgotten)

    def _erase(self, conversation: Conversation) -> None:
        if self._journal is not None and conversation.counted:
            self._journal.forget(conversation.id)
