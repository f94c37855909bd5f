"""Locust users that read streamed answers. ``locust -f load/locustfile.py GrpcUser``, or through ``load/run.py``.

Locust's request statistics are of whole answers. Rows beside them carry what matters of a stream: TTFT (to the first
token that shows), ITL (between two tokens; its request rate is the token rate) and tokens/s (of an answer). Answers
that failed are failures of Locust's and in none of these figures; those that were cancelled have a row of their own.
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

# before the first channel: gRPC then waits in threads of gevent's pool instead of blocking every user
grpc.experimental.gevent.init_gevent()

# a line for every request
logging.getLogger("httpx2").setLevel(logging.WARNING)

LEFT = 0.2
"""Share of the conversations that users leave without an end, as people do. The server has to clean them up."""

END_TIMEOUT_S = 5.0
"""Seconds that the end of a conversation may take when a user goes."""

AFTER_FAILURE_S = 0.5
"""Seconds that a user waits after a failed answer."""

PING_TIMEOUT_S = 1.0
"""Seconds that the users wait for a server's first sign: one that gives none is asked all the same."""

CYCLE_S = 60
"""Length of a scenario in a test without end."""


@events.init_command_line_parser.add_listener
def _options(parser: Any) -> None:
    group = parser.add_argument_group("kvloom")
    group.add_argument("--scenario", choices=list(SCENARIOS), default="steady", help="What the users do.")
    group.add_argument("--lengths", default=str(DEFAULT_FILE), help="JSON file of prompt and answer lengths.")
    group.add_argument("--answer-timeout", type=float, default=60.0, help="Seconds an answer may take.")
    group.add_argument("--turns", type=int, default=4, help="Turns of a conversation.")
    group.add_argument("--thinking", type=float, default=0.0, help="Mean seconds between the turns of a conversation.")
    group.add_argument("--seed", type=int, default=0, help="The same seed asks the same questions.")
    group.add_argument("--answers-file", default="", help="Write every answer's times there, as JSON.")


class Record:
    """Every answer of this process, for the batching report."""

    def __init__(self) -> None:
        self.clear()

    def clear(self) -> None:
        """A test begins."""
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
    """One connection for all users: with one for each, they would need as many of gevent's few threads."""
    client = Client(address)
    # connecting, and all that gRPC does once, takes 40 ms; not in the time of the first answers
    with suppress(KvloomClientError):  # if something is wrong, the answers will say so
        client.control("ping", timeout=PING_TIMEOUT_S)
    return client


@cache
def http_client(address: str) -> HttpClient:
    """One client; each request has a connection of its own."""
    # gevent starts what looks addresses up with the first one; not in the time of the first answer
    with suppress(OSError):  # likewise
        socket.getaddrinfo(address.rpartition(":")[0], None)
    return HttpClient(address)


class StreamUser(User):
    """Asks, reads the answer as it comes, and asks again at once."""

    abstract = True
    numbers = itertools.count()
    connecting = threading.Lock()

    def on_start(self) -> None:
        """Prepare this user's own questions."""
        options = self.environment.parsed_options
        self.options = options
        self.rng = random.Random(f"{options.seed} {next(self.numbers)}")
        self.kinds = read_kinds(Path(options.lengths))
        self.asks: Iterator[Ask] = requests(SCENARIOS[options.scenario], self.kinds, self.rng)
        with self.connecting:  # the first one connects for all
            self.client = self.connect()

    def connect(self) -> Client | HttpClient:
        """The client to ask with."""
        raise NotImplementedError

    @task
    def act(self) -> None:
        """What a user does again and again."""
        self.ask()

    def ask(self) -> None:
        """One question and its answer."""
        self.read(next(self.asks))

    def read(self, ask: Ask, begin: Callable[..., Stream] | None = None, turn: int = 0) -> str | None:
        """Ask and read the answer.

        Args:
            ask: the question.
            begin: begins the stream; the client's own way if it is None.
            turn: which turn of a conversation this is, from 1.

        Returns:
            The answer's text; None if it failed.
        """
        arrivals = Arrivals(time.monotonic(), outcome="cut", turn=turn)
        if self.options.answers_file:  # a test without end would fill the memory
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
            # no time: how long it took to fail says nothing about answers
            self._fire(response_time=None, response_length=arrivals.tokens, exception=error)
        finally:
            arrivals.end = time.monotonic()
        if arrivals.outcome == "failed":
            # a server that refuses at once is not to be stormed
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
        # no time, though the column says milliseconds
        self._log("tokens/s", [arrivals.tokens / arrivals.seconds / 1000])

    def _fire(self, **figures: Any) -> None:
        self.environment.events.request.fire(request_type="answer", name=self.options.scenario, context={}, **figures)

    def _log(self, kind: str, seconds: list[float]) -> None:
        """Into a row of its own, past Locust's aggregate: that one is of answers."""
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
    """Chats in some turns over gRPC. Each turn sends everything that was said before."""

    chat: Chat | None = None
    turn = 0

    def ask(self) -> None:
        """One turn. A new chat begins after the last turn, and after one that failed."""
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
    """Holds conversations in some turns over gRPC. The server keeps their cache; each turn sends only what is new."""

    talk: Conversation | None = None
    turn = 0

    def ask(self) -> None:
        """One turn. A new conversation begins after the last turn, and after one that failed."""
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
        """End the conversation that is under way."""
        if self.talk is not None:
            with suppress(KvloomClientError):  # the answers have told what is wrong with the server
                self.talk.end(timeout=END_TIMEOUT_S)


class Load(LoadTestShape):
    """The scenario's share of ``--users``, over and over where there is no ``--run-time``."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        """How many users there are now, and how fast they come and go."""
        assert self.runner is not None
        options = self.runner.environment.parsed_options
        if options.run_time and self.get_run_time() >= options.run_time:
            return None
        length = options.run_time or CYCLE_S
        users = options.num_users or 1
        share = self.get_run_time() % length / length
        return SCENARIOS[options.scenario].users_at(share, users), options.spawn_rate or users
