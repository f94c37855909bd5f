"""Streamed answers for synchronous and threaded programs, over gRPC and HTTP."""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

from kvloom_client.answer import Chunk, Reply
from kvloom_client.errors import IncompleteAnswer, KvloomClientError, NotFound, TransportError
from kvloom_client.retry import Backoff, Watch


class Call(Iterator[Reply], Protocol):
    """One attempt to send a request, over gRPC or HTTP.

    Iterating gives the replies as they come and raises RequestFailed or TransportError. After a final reply or an error
    the call has closed itself.
    """

    def cancel(self) -> None:
        """Abort the call: the server stops working and a waiting ``next`` returns. Any thread may call this."""


class Stream(Iterator[Chunk]):
    """A running answer. Iterate it for its chunks. A context manager that cancels it.

    Iterating raises RequestFailed (an error of the server) or TransportError (the answer did not arrive completely).
    After ``cancel`` the iteration ends without a finish reason.

    Attributes:
        request_id: the request's id on the server.
    """

    def __init__(
        self,
        call: Callable[[float | None], Call],
        request_id: str,
        url: str,
        timeout: float | None,
        retries: int,
        watch: Watch | None = None,
        mend: Callable[[KvloomClientError, float | None], "Stream | None"] | None = None,
    ):
        """Start the first attempt.

        Args:
            call: begins an attempt. Its argument is the maximum seconds, None for no limit.
            request_id: the request's id.
            url: the server's address, for messages.
            timeout: maximum seconds for all attempts.
            retries: maximum number of retries.
            watch: callbacks for the attempts.
            mend: called once for an error that is not retried, if no part of the answer has arrived, with the remaining
                seconds. It returns a stream that must end before another attempt, or None for no other attempt. If the
                stream fails as NotFound, the first error is raised; any other error of it is raised instead.
        """
        self.request_id = request_id
        self._url = url
        self._begin = call
        self._watch = watch or Watch()
        self._mend = mend
        self._mending: Stream | None = None
        self._backoff = Backoff(retries, timeout, self._watch.may_retry)
        self._ended = False
        self._cancelled = threading.Event()
        self._watch.sending()
        self._call = call(timeout)

    def __iter__(self) -> "Stream":
        return self

    def __next__(self) -> Chunk:
        while not self._ended:
            try:
                reply = next(self._call)
            except StopIteration:
                self._ended = True
                if self._cancelled.is_set():
                    break
                raise IncompleteAnswer(f"{self._url}: the stream ended without a last response") from None
            except KvloomClientError as error:
                if self._try_again(error):
                    continue
                if self._cancelled.is_set() and isinstance(error, TransportError):
                    break
                raise
            self._watch.answered()
            self._backoff.give_up()
            self._mend = None
            self._ended = reply.final
            if reply.chunk is not None:
                return reply.chunk
        raise StopIteration

    def cancel(self) -> None:
        """Cancel the answer on the server. Any thread may call this. Does nothing after the end."""
        if not self._ended:
            self._cancelled.set()
            self._call.cancel()
            if self._mending is not None:
                self._mending.cancel()

    @property
    def ended(self) -> bool:
        """Whether the last chunk was read or the answer has failed."""
        return self._ended

    @property
    def cancelled(self) -> bool:
        """Whether ``cancel`` was called before the answer had ended."""
        return self._cancelled.is_set()

    def __enter__(self) -> "Stream":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.cancel()

    def _try_again(self, error: KvloomClientError) -> bool:
        """Wait and begin another attempt if it is safe and in time. Returns False if the answer has failed."""
        pause = self._backoff.pause_after(error)
        if pause is None and self._mended(error):
            pause = 0.0
        else:
            # Before the pause, because a cancel during the pause ends the attempts
            self._watch.failed(error)
        if pause is None or self._cancelled.wait(pause):
            self._ended = True
            return pause is not None
        self._watch.sending()
        self._call = self._begin(self._backoff.time_left)
        if self._cancelled.is_set():  # `cancel` may have cancelled the previous call
            self._call.cancel()
        return True

    def _mended(self, error: KvloomClientError) -> bool:
        """Run ``mend`` for an error that is not retried. Returns whether another attempt may succeed.

        Raises:
            KvloomClientError: the stream of ``mend`` failed, but not as NotFound.
        """
        mend, self._mend = self._mend, None
        self._mending = mend(error, self._backoff.time_left) if mend is not None else None
        if self._mending is None:
            return False
        if self._cancelled.is_set():  # `cancel` may have come before this stream existed
            self._mending.cancel()
        try:
            list(self._mending)
        except NotFound:
            return False
        except KvloomClientError:
            self._ended = True
            raise
        return True
