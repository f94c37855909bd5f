"""Threads that read requests. They keep the order within a conversation; conversations do not wait for each other."""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable

from kvloom.conversation.registry import ConversationId
from kvloom.faults import logged

log = logging.getLogger(__name__)

READERS = 2
"""Number of threads. Tokenizing releases Python's lock, but parsing JSON and rendering chats hold it, so that more
threads would delay the engine thread."""


class Intake:
    """Runs jobs in its own threads. Jobs for the same conversation run one after the other, in their order."""

    def __init__(self) -> None:
        # The waiting jobs of each conversation, including the running one
        self._jobs: dict[ConversationId, deque[Callable[[], None]]] = {}
        self._lock = threading.Lock()
        self._ready: queue.SimpleQueue[ConversationId | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._run, name=f"kvloom-reader-{number}", daemon=True) for number in range(READERS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, conversation: ConversationId, job: Callable[[], None]) -> None:
        """Queue a job behind the conversation's other jobs. Never blocks."""
        with self._lock:
            waiting = self._jobs.setdefault(conversation, deque())
            waiting.append(job)
            if len(waiting) > 1:
                return
        self._ready.put(conversation)

    def do(self, conversation: ConversationId, job: Callable[[], None]) -> None:
        """Run a job at once in this thread, or queue it if the conversation has unfinished jobs.

        Meant for short jobs, which should not wait for other conversations' long texts. Call it from the same thread
        as ``put``.
        """
        with self._lock:
            pending = conversation in self._jobs
        if pending:
            self.put(conversation, job)
        else:
            job()

    def stop(self) -> None:
        """Finish all jobs, then end the threads. Nothing may be put afterwards."""
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
            # Other conversations take their turn first
            self._ready.put(conversation)
