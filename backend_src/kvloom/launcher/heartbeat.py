"""Checks that a server answers, through the endpoint that its clients use."""

import http.client
import json
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError

PERIOD_S = 1.0
"""Seconds between two pings. A ping takes about 2 ms of CPU time."""

CANARY = {"input_ids": [0], "max_tokens": 1, "temperature": 0.0}
CANARIES, CANARY_PAUSE_S = 3, 0.5
"""This many canaries must fail, because one may have shared a step that another request made fail."""


class NoAnswer(Exception):
    """A ping or a canary got no answer, an error or a malformed answer. ``str()`` is the reason."""


class _Reply(BaseModel):
    """An answer of `generate`, or an error of Triton."""

    model_config = ConfigDict(strict=True)

    text_output: str = ""
    error: str | None = None


class _Pong(BaseModel):
    """The answer to a ping, see ``engine.thread.Pulse``."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)

    since_step_s: float
    failed_steps: int
    draining: bool


Read = TypeVar("Read", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class Beat:
    """The engine's state, see ``engine.thread.Pulse``. ``broken`` is why every step fails, if so."""

    since_step_s: float
    draining: bool
    broken: str | None


class Heartbeat:
    """Pings the engine through `generate`, so that a ping checks both models and Triton's HTTP endpoint.

    The engine answers a ping between two steps. While it answers none, no step has finished either, whatever hangs. A
    full queue does not delay a ping. If steps fail, canaries show whether any step can still succeed.
    """

    def __init__(self, host: str, port: int, stuck_after_s: float):
        """Prepare. The first ``look`` sends the first ping.

        Args:
            host: the host of Triton's HTTP endpoint.
            port: its port.
            stuck_after_s: seconds without a finished step after which the engine counts as stuck; 0 for never.
        """
        self._address = (host, port)
        self._stuck_after_s = stuck_after_s
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="kvloom-heartbeat")
        self._asked: Future[Beat] | None = None
        self._asked_at = self._next = 0.0
        self._answered = float("-inf")
        self._silent_since: float | None = None
        self._beat = Beat(0.0, False, None)
        self._said = ""

    def look(self) -> str | None:
        """Take the answer if it has come, and send the next ping when it is due. Does not block.

        Returns:
            The problem of the engine; None if it works.
        """
        now = time.monotonic()
        if self._asked is not None and self._asked.done():
            try:
                self._beat, self._silent_since, self._said = self._asked.result(), None, ""
                self._answered = self._asked_at
            except NoAnswer as error:
                self._said = f"; the last answer to a ping was: {error}"
            self._asked, self._next = None, now + PERIOD_S
        if self._asked is None and now >= self._next:
            self._silent_since = self._silent_since or now
            self._asked, self._asked_at = self._pool.submit(self._ask_for_beat), now
        return self._problem(now)

    @property
    def draining(self) -> bool:
        """Whether the engine drains and so refuses new requests."""
        return self._beat.draining

    @property
    def answered(self) -> float:
        """When the last ping was sent that has been answered, by ``time.monotonic``; minus infinity: none has been."""
        return self._answered

    def close(self) -> None:
        """Stop. Waits for a running ping; if the server was killed, its connection breaks."""
        self._pool.shutdown()

    def _problem(self, now: float) -> str | None:
        if self._beat.broken is not None:
            return f"every step fails: {self._beat.broken}"
        silent_s = 0.0 if self._silent_since is None else now - self._silent_since
        limit = self._stuck_after_s
        if limit and max(silent_s, self._beat.since_step_s) >= limit:
            return f"no step has finished for {limit:g} s (setting stuck_after_s){self._said}"
        return None

    def _ask_for_beat(self) -> Beat:
        pong = _read(_Pong, self._ask({"control": json.dumps({"op": "ping"})}))
        broken = None
        for _ in range(CANARIES if pong.failed_steps else 0):
            try:
                self._ask(CANARY)
                broken = None
                break
            except NoAnswer as error:
                broken = str(error) if str(error).startswith("INTERNAL") else None
                time.sleep(CANARY_PAUSE_S)
        return Beat(pong.since_step_s, pong.draining, broken)

    def _ask(self, body: dict[str, Any]) -> str:
        connection = http.client.HTTPConnection(
            *self._address, timeout=self._stuck_after_s + 5 if self._stuck_after_s else None
        )
        try:
            connection.request("POST", "/v2/models/generate/generate", json.dumps(body))
            said = connection.getresponse().read()
        except (OSError, http.client.HTTPException) as error:
            raise NoAnswer(f"{type(error).__name__}: {error}") from error
        finally:
            connection.close()
        reply = _read(_Reply, said)
        if reply.error is not None:
            raise NoAnswer(reply.error)
        return reply.text_output


def _read(kind: type[Read], said: str | bytes) -> Read:
    """Parse an answer.

    Raises:
        NoAnswer: it is something else. Another program may listen on the port.
    """
    try:
        return kind.model_validate_json(said)
    except ValidationError as error:
        raise NoAnswer(f"not kvloom's answer: {said[:200]!r}") from error
