"""When a request may be sent once more, and how long to wait before."""

import random

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


class Backoff:
    """Counts the retries of one request."""

    def __init__(self, retries: int):
        """Args: retries: how often the request may be sent again; 0 never."""
        self._left = retries
        self._pause = FIRST_S

    def pause_after(self, error: KvloomClientError) -> float | None:
        """Seconds to wait before the next try; None when the error is to be told."""
        if self._left == 0 or not safe_to_retry(error):
            return None
        self._left -= 1
        # jitter, so that clients that were refused together do not come back together
        pause = self._pause * random.uniform(0.5, 1.0)
        self._pause = min(self._pause * 2, MOST_S)
        return pause
