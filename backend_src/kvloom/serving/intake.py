"""Threads that read requests: those to one conversation in their order, and nobody waits for another's long text."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from kvloom.conversation.registry import ConversationId
from kvloom.faults import logged

log = logging.getLogger(__name__)

READERS = 2
"""Tokenizing lets other threads run, parsing JSON and rendering chats do not: more would hold up the engine thread."""


class Intake:
    """Calls functions in threads of its own, those for one conversation one after the other."""

    def __init__(self) -> None:
        # what is to be called for whom, the one that is being called included
        self._jobs: dict[ConversationId, deque[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[ConversationId | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvloom-reader-{number}", daemon=True) for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, conversation: ConversationId, job: Callable[[], None]) -> None:
        """Let a function be called after those that were put for this conversation before; never waits."""
        with self._lock:
            waiting = self._jobs.setdefault(conversation, deque())
            waiting.append(job)
            if len(waiting) > 1:
                return
        self._ready.put(conversation)

    def do(self, conversation: ConversationId, job: Callable[[], None]) -> None:
        """Call a function at once, in this thread, unless something was put for this conversation: then after that.

        For what is quickly done and must not wait for the long texts of others. Of the same thread as ``put``.
        """
        with self._lock:
            pending = conversation in self._jobs
        if pending:
            self.put(conversation, job)
        else:
            job()

    def stop(self) -> None:
        """Call what is left, then end the threads; nothing is put any more."""
        with self._lock:
            last = list(self._jobs)
        for conversation in last:
            done = threading.Event()
            self.put(conversation, done.set)
            done.wait()
        for _ in self._threads:
            self._ready.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self) -> None:
        while (conversation := self._ready.get()) is not None:
            with logged(log, "a request to conversation %s failed and was dropped", conversation):
                self._jobs[conversation][0]()
            with self._lock:
                waiting = self._jobs[conversation]
                waiting.popleft()
                if not waiting:
                    del self._jobs[conversation]
                    continue
            # behind the others
            self._ready.put(conversation)
