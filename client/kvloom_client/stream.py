"""An answer on its way, for plain and threaded programs; the same over gRPC and HTTP."""

import threading
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Protocol

from kvloom_client.answer import Chunk, Reply
from kvloom_client.errors import IncompleteAnswer, KvloomClientError, NotFound, TransportError
from kvloom_client.retry import Backoff, Watch


class Call(Iterator[Reply], Protocol):
    """One try of one request, in some protocol.

    Iterating gives the replies as they come and raises RequestFailed or TransportError. With a final reply or an
    error the call has closed itself.
    """

    def cancel(self) -> None:
        """Break the call off, so that the server stops working and a waiting ``next`` returns. From any thread."""


class Stream(Iterator[Chunk]):
    """An answer on its way: iterate it for its chunks. As a context manager it is cancelled on leaving.

    Iterating raises RequestFailed (the server's error) or TransportError (it did not arrive whole). After ``cancel``
    the iteration just ends, without a finish reason.

    Attributes:
        request_id: the request's id, as the server sees it.
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
        """Start the first try.

        Args:
            call: begins a try; its argument is the seconds it may take, None for no limit.
            request_id: the request's.
            url: for messages.
            timeout: seconds for all tries.
            retries: how many more tries there may be.
            watch: follows the tries; None where nobody does.
            mend: asked once of an error that is not retried, with the seconds left, before anything of the answer has
                arrived: what has to come to its end before another try, None for no other try. Where it fails as
                NotFound the error stands, any other failure of it takes the error's place.
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
        """Tell the server to stop working on the answer; any thread may call it, also after the end."""
        if not self._ended:
            self._cancelled.set()
            self._call.cancel()
            if self._mending is not None:
                self._mending.cancel()

    @property
    def ended(self) -> bool:
        """Whether nothing follows what was read."""
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
        """Wait and begin another try where that is safe and there is time; False: the error ends the answer."""
        pause = self._backoff.pause_after(error)
        if pause is None and self._mended(error):
            pause = 0.0
        else:
            # before the pause: who cancels in it ends the tries there
            self._watch.failed(error)
        if pause is None or self._cancelled.wait(pause):
            self._ended = True
            return pause is not None
        self._watch.sending()
        self._call = self._begin(self._backoff.time_left)
        if self._cancelled.is_set():  # it may have hit the call before
            self._call.cancel()
        return True

    def _mended(self, error: KvloomClientError) -> bool:
        """Whether another try may succeed where this error is not retried. Raises what has kept it from finding out."""
        mend, self._mend = self._mend, None
        self._mending = mend(error, self._backoff.time_left) if mend is not None else None
        if self._mending is None:
            return False
        if self._cancelled.is_set():  # it may have seen none
            self._mending.cancel()
        try:
            list(self._mending)
        except NotFound:
            return False
        except KvloomClientError:
            self._ended = True
            raise
        return True
