"""The scenarios of load tests: how many users there are at which time, and their requests."""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from kvloom_client import RequestArguments
from kvloom_load.lengths import Kind

WORDS = (  # noqa: SIM905 as a list it would be a line for each word
    "the of and to in is that for it was on with as his they at be this from have or by one had not but what all were"
    " when we there can an your which their said if do will each about how up out them then she many some so these"
    " would other into has more her two like him see time could no make than first been its who now people my made"
    " over did down only way find use may water long little very after words called just where most know"
).split()
"""The words of prompts. Each is one token in the usual vocabularies."""

ScenarioName = Literal["steady", "ramp", "burst", "shared_prefix", "long_short", "cancel_storm"]


@dataclass(frozen=True)
class Scenario:
    """A load test.

    Attributes:
        about: a short description.
        load: the share of the users that are active in each of the run's equal parts.
        mix: kinds of requests in the file of lengths, and the relative frequency of each.
        shared_tokens: length of the common prefix of all prompts, in tokens.
        cancelled: share of the requests that are cancelled during their answer.
    """

    about: str
    load: tuple[float, ...] = (1.0,)
    mix: tuple[tuple[str, float], ...] = (("chat", 1.0),)
    shared_tokens: int = 0
    cancelled: float = 0.0

    def users_at(self, share: float, users: int) -> int:
        """How many of ``users`` are active after this share of the run."""
        part = min(int(share * len(self.load)), len(self.load) - 1)
        return max(1, round(self.load[part] * users))


SCENARIOS: dict[ScenarioName, Scenario] = {
    "steady": Scenario("the same number of users all the time"),
    "ramp": Scenario("more users in every eighth of the run", load=tuple(part / 8 for part in range(1, 9))),
    "burst": Scenario("few users, and twice suddenly all of them", load=(0.125, 1.0, 0.125, 1.0, 0.125)),
    "shared_prefix": Scenario("prompts that begin with the same 256 tokens", shared_tokens=256),
    "long_short": Scenario("one long prompt for every four short ones", mix=(("chat", 4.0), ("long", 1.0))),
    "cancel_storm": Scenario("users cancel every second answer before it ends", cancelled=0.5),
}


@dataclass(frozen=True)
class Ask:
    """One request of a user.

    Attributes:
        request: the arguments of the request.
        cancel_after: number of tokens after which the user cancels the answer; None to wait for its end.
    """

    request: RequestArguments
    cancel_after: int | None = None


def requests(scenario: Scenario, kinds: Mapping[str, Kind], rng: random.Random) -> Iterator[Ask]:
    """The endless requests of one user. Answers have exactly the length that was drawn."""
    prefix = random.Random("shared").choices(WORDS, k=scenario.shared_tokens)
    names, weights = zip(*scenario.mix, strict=True)
    while True:
        kind = kinds[rng.choices(names, weights)[0]]
        tokens = kind.output.draw(rng)
        cancelled = rng.random() < scenario.cancelled
        prompt = " ".join(prefix + rng.choices(WORDS, k=kind.prompt.draw(rng)))
        yield Ask(
            RequestArguments(text_input=prompt, max_tokens=tokens, temperature=0.0, ignore_eos=True),
            rng.randint(1, tokens) if cancelled else None,
        )


class Chat:
    """A chat in which every turn sends all earlier messages."""

    def __init__(self, kind: Kind, rng: random.Random):
        self._kind = kind
        self._rng = rng
        self._messages: list[Mapping[str, str]] = []

    def turn(self) -> Ask:
        """The user's next turn."""
        ask = turn(self._kind, self._rng, self._messages)
        self._messages = list(ask.request["messages"] or ())
        return ask

    def answered(self, text: str) -> None:
        """Add the model's answer."""
        self._messages.append({"role": "assistant", "content": text})


def turn(kind: Kind, rng: random.Random, before: Sequence[Mapping[str, str]] = ()) -> Ask:
    """A request with a user's next message after the messages ``before``."""
    words = " ".join(rng.choices(WORDS, k=kind.prompt.draw(rng)))
    return Ask(
        RequestArguments(
            messages=[*before, {"role": "user", "content": words}],
            max_tokens=kind.output.draw(rng),
            temperature=0.0,
            ignore_eos=True,
            return_usage=True,
        )
    )
