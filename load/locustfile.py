"""Locust users that read streamed answers. ``locust -f load/locustfile.py GrpcUser``, or through ``load/run.py``.

Locust's request statistics count whole answers. Further rows have the figures of streams: TTFT (time to the first
visible token), ITL (time between two tokens; its request rate is the token rate) and tokens/s (of an answer). Failed
answers are Locust's failures and are not in these figures. Cancelled answers have a separate row.
"""

import itertools
import json
import logging
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

import grpc.experimental.gevent
from locust import LoadTestShape, User, events, task

from kvloom_client import Client, Conversation, HttpClient, KvloomClientError, NotFound, Stream
from kvloom_load.arrivals import Arrivals
from kvloom_load.lengths import DEFAULT_FILE, read_kinds
from kvloom_load.scenarios import SCENARIOS, Ask, Chat, requests, turn

# Before the first channel: gRPC then waits in threads of gevent's pool instead of blocking every user
grpc.experimental.gevent.init_gevent()

# It logs a line for every request
logging.getLogger("httpx2").setLevel(logging.WARNING)

LEFT = 0.2
"""Share of the conversations that users do not end, as people do. The server has to clean them up."""

END_TIMEOUT_S = 5.0
"""Timeout in seconds for ending a conversation when a user stops."""

AFTER_FAILURE_S = 0.5
"""Seconds that a user waits after a failed answer."""

PING_TIMEOUT_S = 1.0
"""Timeout in seconds for the first ping. If it fails, users send their requests anyway."""

CYCLE_S = 60
"""Length of a scenario in a test without a time limit."""


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    group = parser.add_argument_group("kvloom")
    group.add_argument("--scenario", choices=list(SCENARIOS), default="steady", help="What the users do.")
    group.add_argument("--lengths", default=str(DEFAULT_FILE), help="JSON file of prompt and answer lengths.")
    group.add_argument("--answer-timeout", type=float, default=60.0, help="Maximum seconds of an answer.")
    group.add_argument("--turns", type=int, default=4, help="Turns of a conversation.")
    group.add_argument("--thinking", type=float, default=0.0, help="Mean seconds between the turns of a conversation.")
    group.add_argument("--seed", type=int, default=0, help="The same seed gives the same requests.")
    group.add_argument("--answers-file", default="", help="Write every answer's times to this JSON file.")


class Record:
    """Every answer of this process, for the batching report."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """Start a new record when a test begins."""
        self.begin = time.monotonic()
        self.answers: list[Arrivals] = []


record = Record()


@events.test_start.add_listener
def _begin(**_: Any) -> None:
    record.clear()


@events.quitting.add_listener
def _write(environment: Any, **_: Any) -> None:
    if environment.parsed_options.answers_file:
        content = {"begin": record.begin, "answers": [asdict(arrivals) for arrivals in record.answers]}
        Path(environment.parsed_options.answers_file).write_text(json.dumps(content))


@cache
def grpc_client(address: str) -> Client:
    """The client of all users. One connection each would need as many of gevent's few threads."""
    client = Client(address)
    # Connecting takes 40 ms, which must not count in the time of the first answers
    with suppress(KvloomClientError):  # if something is wrong, the answers will fail
        client.control("ping", timeout=PING_TIMEOUT_S)
    return client


@cache
def http_client(address: str) -> HttpClient:
    """The client of all users. Each request has a separate connection."""
    # gevent's first address lookup is slow and must not count in the time of the first answer
    with suppress(OSError):  # if something is wrong, the answers will fail
        socket.getaddrinfo(address.rpartition(":")[0], None)
    return HttpClient(address)


class StreamUser(User):
    """Sends a request, reads the answer as it comes, and sends the next request at once."""

    abstract = True
    numbers = itertools.count()
    connecting = threading.Lock()

    def on_start(self) -> None:
        """Prepare this user's requests."""
        options = self.environment.parsed_options
        self.options = options
        self.rng = random.Random(f"{options.seed} {next(self.numbers)}")
        self.kinds = read_kinds(Path(options.lengths))
        self.asks: Iterator[Ask] = requests(SCENARIOS[options.scenario], self.kinds, self.rng)
        with self.connecting:  # the first one connects for all
            self.client = self.connect()

    def connect(self) -> Client | HttpClient:
        """The client for this user's requests."""
        raise NotImplementedError

    @task
    def act(self) -> None:
        """The task that Locust repeats."""
        self.ask()

    def ask(self) -> None:
        """Send one request and read its answer."""
        self.read(next(self.asks))

    def read(self, ask: Ask, begin: Callable[..., Stream] | None = None, turn: int = 0) -> str | None:
        """Send a request and read its answer.

        Args:
            ask: the request.
            begin: begins the stream; None for the client's ``stream``.
            turn: the number of the turn in its conversation, from 1.

        Returns:
            The answer's text; None if it failed.
        """
        arrivals = Arrivals(time.monotonic(), outcome="cut", turn=turn)
        if self.options.answers_file:  # otherwise a test without a time limit would fill the memory
            record.answers.append(arrivals)
        texts: list[str] = []
        try:
            with (begin or self.client.stream)(timeout=self.options.answer_timeout, **ask.request) as stream:
                for chunk in stream:
                    arrivals.add(chunk, time.monotonic())
                    texts.append(chunk.text)
                    if ask.cancel_after and arrivals.tokens >= ask.cancel_after and not stream.cancelled:
                        cancelled_at = time.monotonic()
                        stream.cancel()
        except KvloomClientError as error:
            arrivals.outcome = "failed"
            arrivals.lost = isinstance(error, NotFound)
            # No time, because the time of a failure is not the time of an answer
            self._fire(response_time=None, response_length=arrivals.tokens, exception=error)
        finally:
            arrivals.end = time.monotonic()
        if arrivals.outcome == "failed":
            # Do not flood a server that refuses at once
            time.sleep(AFTER_FAILURE_S)
            return None
        if stream.cancelled:
            arrivals.outcome = "cancelled"
            self._log("cancelled", [arrivals.end - cancelled_at])
        else:
            arrivals.outcome = "ok"
            self._succeed(arrivals)
        return "".join(texts)

    def think(self) -> None:
        """Wait as a person does before the next turn."""
        if self.options.thinking:
            time.sleep(self.rng.expovariate(1 / self.options.thinking))

    def _succeed(self, arrivals: Arrivals) -> None:
        self._fire(response_time=arrivals.seconds * 1000, response_length=arrivals.tokens, exception=None)
        if arrivals.ttft is not None:
            self._log("TTFT", [arrivals.ttft])
        self._log("ITL", arrivals.gaps)
        # This is not a time, although the column says milliseconds
        self._log("tokens/s", [arrivals.tokens / arrivals.seconds / 1000])

    def _fire(self, **figures: Any) -> None:
        self.environment.events.request.fire(request_type="answer", name=self.options.scenario, context={}, **figures)

    def _log(self, kind: str, seconds: list[float]) -> None:
        """Log values into a separate row, outside of Locust's aggregate, which counts answers."""
        entry = self.environment.stats.entries[self.options.scenario, kind]
        for value in seconds:
            entry.log(value * 1000, 0)


class GrpcUser(StreamUser):
    """Streams from `llm` over gRPC."""

    host = "127.0.0.1:8001"
    client: Client

    def connect(self) -> Client:
        """The client of all users."""
        return grpc_client(self.host)


class SseUser(StreamUser):
    """Streams from `generate` over HTTP, as server-sent events."""

    host = "127.0.0.1:8000"

    def connect(self) -> HttpClient:
        """The client of all users."""
        return http_client(self.host.removeprefix("http://"))


class ChatUser(GrpcUser):
    """Chats in turns over gRPC. Each turn sends all earlier messages."""

    chat: Chat | None = None
    turn = 0

    def ask(self) -> None:
        """Send one turn. A new chat begins after the last turn and after a failed turn."""
        if self.chat is None:
            self.chat, self.turn = Chat(self.kinds["turn"], self.rng), 0
        self.turn += 1
        text = self.read(self.chat.turn(), turn=self.turn)
        if text is None or self.turn == self.options.turns:
            self.chat = None
        else:
            self.chat.answered(text)
            self.think()


class ConversationUser(GrpcUser):
    """Holds conversations over gRPC. The server keeps their KV cache, and each turn sends only the new message."""

    talk: Conversation | None = None
    turn = 0

    def ask(self) -> None:
        """Send one turn. A new conversation begins after the last turn and after a failed turn."""
        if self.talk is None:
            self.talk, self.turn = self.client.conversation(), 0
        self.turn += 1
        over = self.turn == self.options.turns
        last = over and self.rng.random() >= LEFT
        text = self.read(turn(self.kinds["turn"], self.rng), partial(self.talk.stream, last=last), self.turn)
        if text is None or over:
            self.talk = None
        else:
            self.think()

    def on_stop(self) -> None:
        """End the current conversation."""
        if self.talk is not None:
            with suppress(KvloomClientError):  # if something is wrong, the answers have failed
                self.talk.end(timeout=END_TIMEOUT_S)


class Load(LoadTestShape):
    """Applies the scenario's share of ``--users`` over the time. Repeats it if there is no ``--run-time``."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """The current number of users, and how many per second start or stop."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        if options.run_time and self.get_run_time() >= options.run_time:
            return None
        length = options.run_time or CYCLE_S
        users = options.num_users or 1
        share = self.get_run_time() % length / length
        return SCENARIOS[options.scenario].users_at(share, users), options.spawn_rate or users
