"""Decides when a request may be sent again, and how long to wait before."""

import random
import time
from collections.abc import Callable

from kvloom_client.errors import ConnectionFailed, KvloomClientError, Unavailable

FIRST_S = 0.1
MOST_S = 5.0
"""Seconds before the first retry and the maximum. Each further retry doubles the pause."""


def safe_to_retry(error: KvloomClientError) -> bool:
    """Whether the server has certainly not processed the request, if no part of its answer has arrived.

    This holds if there was no connection, or if the server refused the request as UNAVAILABLE. It does not hold if a
    connection broke.
    """
    return isinstance(error, Unavailable) or (isinstance(error, ConnectionFailed) and not error.sent)


class Watch:
    """Callbacks for the attempts of a request, and the decision which errors may be retried.

    This base class is for a request outside of conversations.
    """

    def sending(self) -> None:
        """Called when an attempt begins."""

    def answered(self) -> None:
        """Called for each part of the answer that has arrived."""

    def failed(self, error: KvloomClientError) -> None:
        """Called when an attempt has failed with ``error``. Another one may follow."""

    def may_retry(self, error: KvloomClientError) -> bool:
        """Whether another attempt is safe, if no part of the answer has arrived."""
        return safe_to_retry(error)


class Backoff:
    """Counts the retries of one request and the time that is left for it."""

    def __init__(self, retries: int, timeout: float | None, may_retry: Callable[[KvloomClientError], bool]):
        """Begin with the first attempt.

        Args:
            retries: maximum number of retries.
            timeout: maximum seconds for all attempts together; None for no limit.
            may_retry: whether a retry is safe after an error.
        """
        self._retries = retries
        self._may_retry = may_retry
        self._pause = FIRST_S
        self._deadline = None if timeout is None else time.monotonic() + timeout

    @property
    def time_left(self) -> float | None:
        """Seconds that the next attempt may take; None for no limit."""
        return None if self._deadline is None else max(0.0, self._deadline - time.monotonic())

    def give_up(self) -> None:
        """Allow no more retries, because a part of the answer has arrived and a retry would repeat it."""
        self._retries = 0

    def pause_after(self, error: KvloomClientError) -> float | None:
        """Seconds to wait before the next attempt; None if the request has failed with ``error``."""
        if self._retries == 0 or not self._may_retry(error):
            return None
        # Jitter, so that clients that were refused together do not retry together
        pause = self._pause * random.uniform(0.5, 1.0)
        left = self.time_left
        if left is not None and left <= pause:
            return None
        self._retries -= 1
        self._pause = min(self._pause * 2, MOST_S)
        return pause
