"""Many conversations and little memory: turns at random, barge-ins, clients that leave, and what each was told."""

import random
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom_client import Client, NotFound, Unavailable
from support.server import metrics
from support.tiny_server import GREEDY, Tiny, tokens

LONGEST = 250
"""Tokens of a history after which it ends: an answer that nobody interrupts in time has 400, and the pool holds 768."""


class Talker:
    """A client's idea of a conversation, and everything it was answered."""

    def __init__(self, client: Client, name: int | str):
        self.talk = client.conversation(name)
        self.history: list[int] = []
        # a history, and what was answered to it
        self.answers: list[tuple[list[int], list[int]]] = []
        self.lock = threading.Lock()

    def turn(self, rng: random.Random) -> str:
        """One turn; returns what became of it."""
        new = tokens(rng.randrange(10**9), rng.randint(1, 40))
        kind = rng.choices(["whole", "interrupted", "left", "last"], [10, 2, 2, 1])[0]
        if len(self.history) > LONGEST:
            kind = "last"
        begun = self.talk.begun
        try:
            if kind in ("whole", "last"):
                length = rng.randint(1, 24)
                answer = self.talk.generate(
                    input_ids=new, max_tokens=length, last=kind == "last", **GREEDY, timeout=120
                ).token_ids
                assert len(answer) == length
            else:
                answer = getattr(self, kind)(new, rng)
        except NotFound as error:
            assert begun, "a start can't be unknown"
            assert "evicted" in error.text, error
            self.history = []
            return "lost"
        except Unavailable as error:
            assert error.text.startswith("UNAVAILABLE: max_conversations"), error
            assert not begun
            return "refused"
        self.history += new
        self.answers.append((list(self.history), list(answer)))
        self.history += answer
        if kind == "last":
            self.history = []
        return kind

    def interrupted(self, new: list[int], rng: random.Random) -> list[int]:
        """A barge-in: what was said is known to the token."""
        with self.talk.stream(input_ids=new, max_tokens=400, **GREEDY, timeout=120) as stream:
            said = list(next(stream).token_ids)
            time.sleep(rng.random() / 50)
            self.talk.interrupt(timeout=120)
            return said + [token for chunk in stream for token in chunk.token_ids]

    def left(self, new: list[int], rng: random.Random) -> list[int]:
        """A client that goes away; how much was said only the server knows."""
        with self.talk.stream(input_ids=new, max_tokens=400, **GREEDY, timeout=120) as stream:
            said = list(next(stream).token_ids)
            time.sleep(rng.random() / 50)
        while (status := self.talk.status(timeout=120))["busy"]:
            time.sleep(0.02)
        return said + [-1] * (status["tokens"] - len(self.history) - len(new) - len(said))


def storm(tiny: Tiny, conversations: int, turns: int, at_once: int, most: int, **settings: object) -> Counter[str]:
    """A turn of each conversation, more than there may be, then turns of random ones.

    Afterwards every answer is compared with that to its history alone.
    """
    with tiny.serve(max_conversations=most, max_queue=4096, **settings) as server, tiny.client(server) as client:
        names = [number if number % 2 else str(number) for number in range(1, conversations + 1)]
        talkers = [Talker(client, name) for name in names]
        outcomes: Counter[str] = Counter()

        def one(number: int) -> str:
            rng = random.Random(number)
            talker = talkers[number] if number < conversations else rng.choice(talkers)
            with talker.lock:
                return talker.turn(rng)

        with ThreadPoolExecutor(at_once) as pool:
            outcomes.update(pool.map(one, range(conversations)))
            time.sleep(0.3)
            live = metrics(server)["kvloom_conversations"]
            assert live == most, "there are as many as there may be"
            outcomes.update(pool.map(one, range(conversations, conversations + turns)))

        def compare(pair: tuple[list[int], list[int]]) -> None:
            history, answer = pair
            alone = client.generate(
                input_ids=history, max_tokens=len(answer), cache_salt="alone", **GREEDY, timeout=300
            )
            assert answer == list(alone.token_ids)

        for talker in talkers:
            unheard_filled(client, talker)
        with ThreadPoolExecutor(at_once) as pool:
            list(pool.map(compare, [pair for talker in talkers for pair in talker.answers]))
            list(pool.map(lambda talker: talker.talk.end(timeout=120), talkers))
    return outcomes


def unheard_filled(client: Client, talker: Talker) -> None:
    """Put what a client did not hear into the histories that contain it."""
    for place, (history, answer) in enumerate(talker.answers):
        if -1 in answer:
            length = len(answer)
            whole = list(
                client.generate(
                    input_ids=history, max_tokens=length, cache_salt="alone", **GREEDY, timeout=300
                ).token_ids
            )
            assert [token for token in answer if token >= 0] == whole[: length - answer.count(-1)]
            before = [*history, *answer]
            talker.answers[place] = (history, whole)
            for later in range(place + 1, len(talker.answers)):
                longer, its = talker.answers[later]
                if longer[: len(before)] == before:
                    talker.answers[later] = ([*history, *whole, *longer[len(before) :]], its)


def check(outcomes: Counter[str]) -> None:
    print(dict(outcomes))
    for kind in ("whole", "interrupted", "left", "last", "lost"):
        assert outcomes[kind], f"nothing was {kind}: {outcomes}"


@pytest.mark.alone
def test_storm(tiny):
    # blocks for 6 conversations, a host pool for 3 more
    check(storm(tiny, conversations=60, turns=200, at_once=8, most=50, kv_blocks=48, swap_memory="160KiB"))


@pytest.mark.alone
@pytest.mark.full
def test_storm_full(tiny):
    check(storm(tiny, conversations=1100, turns=3000, at_once=32, most=1000, kv_blocks=800, swap_memory="2MiB"))
