"""Starts and ends conversations, and keeps Triton and the journal up to date. Only the engine thread uses it."""

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
    """Starts and ends sequences in Triton's sequence batcher. Each call returns at once."""

    def end(self, conversation: ConversationId) -> None:
        """End the sequence with this id."""

    def start(self, conversation: ConversationId) -> None:
        """Start a sequence with this id."""

    def taken(self, conversation: ConversationId) -> None:
        """Drop pending calls for this id, because a client has started a new conversation with it."""


class Post(Protocol):
    """Runs calls in order, after the deltas that were sent before them have been delivered."""

    def __call__(self, *calls: Callable[[], None]) -> None:
        """Run these calls."""


class NoTriton:
    """Replaces Triton when the engine runs without it."""

    def end(self, conversation: ConversationId) -> None:
        """Do nothing."""

    def start(self, conversation: ConversationId) -> None:
        """Do nothing."""

    def taken(self, conversation: ConversationId) -> None:
        """Do nothing."""


class ConversationManager:
    """Begins, restores, drops and ends conversations. ``TurnScheduler`` runs their turns.

    Args:
        scheduler: holds their KV state.
        registry: an empty registry.
        triton: starts and ends Triton's sequences.
        journal: saves their histories for the next engine; None to save nothing.
        post: calls clients and Triton after the deltas before, so that no end overtakes a conversation's last delta.

    Attributes:
        registry: the conversations by id.
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
        """Restore the conversations that an earlier engine left in the journal, and start their sequences in Triton."""
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
                # Its first turn had not finished, or it was written for another model
                self._journal.forget(found.id)
                self._remember(found.id, "lost")
            self._tell(self._triton.start, found.id)

    def make_way(self, conversation_id: ConversationId, counted: bool) -> Conversation | None:
        """Free an id for a new conversation. If it is ``counted``, make room for one more conversation, too.

        Returns:
            The conversation that had the id, if there is one. It continues without an id until it ends.

        Raises:
            Unavailable: no conversation can make room. Nothing has changed.
        """
        old = self.registry.get(conversation_id)
        if counted and (old is None or not old.counted):
            self._make_room()
        if old is not None:
            self.registry.detach(old)
            self._erase(old)
        return old

    def begin(self, conversation: Conversation) -> None:
        """Add a conversation that a client has started. Its id must be free."""
        if self._journal is not None and conversation.counted:
            self._journal.begin(conversation)
        self.registry.add(conversation)
        self._tell(self._triton.taken, conversation.id)

    def record(self, conversation: Conversation, before: "array[int]", said: "list[Message] | None") -> None:
        """Write a finished turn to the journal, see ``Journal.add``."""
        if self._journal is not None and conversation.counted and not conversation.detached:
            self._journal.add(conversation, before, said)

    def continued(self, conversation_id: ConversationId) -> Conversation:
        """The conversation that a turn continues.

        Raises:
            NotFound: there is none, or it is ending. The caller must send this error to the client.
        """
        try:
            conversation = self.registry.find(conversation_id)
        except NotFound:
            # The client gets this error. If its request has no end flag, `refused` ends the sequence in Triton
            self.registry.forget(conversation_id)
            raise
        if conversation.ending:
            raise NotFound(f"conversation {conversation_id}: ended by an earlier request")
        return conversation

    def end(self, conversation_id: ConversationId, done: Callable[[], None]) -> None:
        """End a conversation after its queued turns, then call ``done``.

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
        """Remove a conversation that has ended, and free its KV state."""
        try:
            self.registry.remove(conversation)
            if not conversation.detached:
                self._erase(conversation)
            self._scheduler.discard(conversation.held)
        finally:
            # Callers of `end` must not wait for ever if this fails
            known = conversation.open_in_triton and not conversation.detached
            self._post(*([partial(self._triton.end, conversation.id)] if known else []), *conversation.on_end)

    def expire(self, now: float) -> None:
        """Drop conversations that have been idle for too long."""
        for conversation in self.registry.expired(now):
            self._drop(conversation, "expired")

    def refused(self, conversation_id: ConversationId, end: bool) -> None:
        """Clean up after a request to this id that was refused. ``end`` was its sequence flag."""
        if end:
            self.ended_in_triton(conversation_id)
        elif not self.registry.knows(conversation_id):
            # Triton has started a sequence for a start that was refused
            self._tell(self._triton.end, conversation_id)

    def ended_in_triton(self, conversation_id: ConversationId) -> None:
        """End the conversation, because a client has ended its sequence in Triton."""
        self.registry.forget(conversation_id)
        conversation = self.registry.get(conversation_id)
        if conversation is not None:
            conversation.open_in_triton = False
            self.end(conversation_id, lambda: None)

    def began_in_triton(self, conversation_id: ConversationId) -> None:
        """End the sequence that a control request has started in Triton, unless this id has a conversation."""
        if not self.registry.knows(conversation_id):
            self._tell(self._triton.end, conversation_id)

    def forgotten_by_triton(self, conversation_id: ConversationId) -> None:
        """Start the sequence again if a client has started a conversation while we ended the sequence in Triton."""
        if self.registry.knows(conversation_id):
            self._tell(self._triton.start, conversation_id)

    def _tell(self, what: Callable[[ConversationId], None], conversation_id: ConversationId) -> None:
        """Call a function of ``Triton``."""
        self._post(partial(what, conversation_id))

    def _make_room(self) -> None:
        """Make room for one more conversation by dropping an idle one if necessary."""
        oldest = self.registry.room()
        if oldest is not None:
            self._drop(oldest, "evicted")

    def _drop(self, conversation: Conversation, loss: Loss) -> None:
        """End an idle conversation. Its client gets an error with its next turn."""
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
