"""When a request may be sent once more, and how long to wait before."""

import random
import time
from collections.abc import Callable

from kvloom_client.errors import ConnectionFailed, KvloomClientError, Unavailable

FIRST_S = 0.1
MOST_S = 5.0
"""Seconds before the first retry, doubled for each further one up to the second figure."""


def safe_to_retry(error: KvloomClientError) -> bool:
    """Whether the server surely did not work on the request, provided that nothing of its answer has arrived.

    So it is when no connection came about, or when the server refused it as UNAVAILABLE. A connection that broke
    proves nothing.
    """
    return isinstance(error, Unavailable) or (isinstance(error, ConnectionFailed) and not error.sent)


class Watch:
    """Hears how the tries of a request fare, and says after which error there may be another.

    This one is for a request that nothing else depends on.
    """

    def sending(self) -> None:
        """A try begins."""

    def answered(self) -> None:
        """Something of the answer has arrived; said of each part of it."""

    def failed(self, error: KvloomClientError) -> None:
        """A try has ended with this error; another one may follow."""

    def may_retry(self, error: KvloomClientError) -> bool:
        """Whether another try is safe, provided that nothing of the answer has arrived."""
        return safe_to_retry(error)


class Backoff:
    """Counts the retries of one request and the time that is left for it."""

    def __init__(self, retries: int, timeout: float | None, may_retry: Callable[[KvloomClientError], bool]):
        """Begin with the first try.

        Args:
            retries: how often the request may be sent again; 0 never.
            timeout: seconds for all tries together; None for no limit.
            may_retry: whether that is safe after an error.
        """
        self._retries = retries
        self._may_retry = may_retry
        self._pause = FIRST_S
        self._deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def time_left(self) -> float | None:
        """Seconds that the next try may take; None for no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def give_up(self) -> None:
        """Allow no retry any more: part of the answer is here, and another try would say it twice."""
        self._retries = 0

    def pause_after(self, error: KvloomClientError) -> float | None:
        """Seconds to wait before the next try; None when the error is to be told."""
        if self._retries == 0 or not self._may_retry(error):
            return None
        # jitter, so that clients that were refused together do not come back together
        pause = self._pause * random.uniform(0.5, 1.0)
        left = self.time_left
        if left is not None and left <= pause:
            return None
        self._retries -= 1
        self._pause = min(self._pause * 2, MOST_S)
        return pause
