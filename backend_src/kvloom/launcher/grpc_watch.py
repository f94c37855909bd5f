"""Asks a server's gRPC endpoint for signs of life: it can hang while the HTTP endpoint and the engine work."""

import time
from concurrent.futures import Future, ThreadPoolExecutor

from kvloom_client import AnswerTimeout, Client, RequestFailed, TransportError

PERIOD_S = 1.0
"""Seconds between two pings; one costs about 3 ms of processor time."""

TIMEOUT_S = 3.0
LATER_S = 1.0
FAILURES = 3
"""After so many in a row the endpoint counts as hung: Triton may lose a single request."""


class GrpcWatch:
    """Pings the engine over gRPC, on a new connection each time, as a new client does.

    A ping that is not answered in time says nothing as long as the engine is in a long step. So it counts as a failure
    only if meanwhile a later ping was answered over HTTP.
    """

    def __init__(self, url: str):
        """Nothing is asked yet.

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
        """Take the answer that has come, ask again when it is time; never waits.

        Args:
            answered_over_http: when the last ping was sent that has been answered over HTTP.

        Returns:
            What is wrong with the endpoint; None as long as it works, and as long as nobody knows.
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
        """Ask no more; waits for the question on its way."""
        self._pool.shutdown()

    def _ask(self) -> TransportError | None:
        try:
            with Client(self._url) as client:
                client.control("ping", timeout=TIMEOUT_S)
        except RequestFailed:
            pass  # an answer, too: what is wrong with the engine its heartbeat finds out
        except TransportError as failure:
            return failure
        return None
