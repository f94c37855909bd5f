"""Pings a server over gRPC. The gRPC endpoint can hang while the HTTP endpoint and the engine work."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from kvloom_client import AnswerTimeout, Client, RequestFailed, TransportError

PERIOD_S = 1.0
"""Seconds between two pings. A ping takes 7 ms of CPU time."""

TIMEOUT_S = 3.0
LATER_S = 1.0
FAILURES = 3
"""Failed pings in a row after which the endpoint counts as hung. Triton may lose a single request."""


class GrpcWatch:
    """Pings the engine over gRPC, with a new connection each time, like a new client.

    During a long step no ping is answered in time, so that a timeout counts as a failure only if a later ping was
    answered over HTTP.
    """

    def __init__(self, url: str):
        """Prepare. The first ``look`` sends the first ping.

        Args:
            url: ``host:port`` of Triton's gRPC endpoint.
        """
        self._url = url
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvloom-grpc-watch")
        self._asked: Future[TransportError | None] | None = None
        self._asked_at = self._next = 0.0
        self._failures = 0
        self._said = ""

    def look(self, answered_over_http: float) -> str | None:
        """Take the answer if it has come, and send the next ping when it is due. Does not block.

        Args:
            answered_over_http: when the last ping that was answered over HTTP was sent.

        Returns:
            The problem of the endpoint; None if it works, or if that is not known yet.
        """
        now = time.monotonic()
        if self._asked is not None and self._asked.done():
            failure = self._asked.result()
            if failure is None:
                self._failures = 0
            elif not isinstance(failure, AnswerTimeout) or answered_over_http > self._asked_at + LATER_S:
                self._failures += 1
                self._said = str(failure)
            self._asked, self._next = None, now + PERIOD_S
        if self._asked is None and now >= self._next:
            self._asked, self._asked_at = self._pool.submit(self._ask), now
        if self._failures < FAILURES:
            return None
        return f"the gRPC endpoint does not work: {FAILURES} pings in a row failed; the last one: {self._said}"

    def close(self) -> None:
        """Stop, and wait for the current ping."""
        self._pool.shutdown()

    def _ask(self) -> TransportError | None:
        try:
            with Client(self._url) as client:
                client.control("ping", timeout=TIMEOUT_S)
        except RequestFailed:
            pass  # also an answer; the heartbeat finds out what is wrong with the engine
        except TransportError as failure:
            return failure
        return None
