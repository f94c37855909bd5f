"""What the users of a load test ask for."""

import random

import pytest

from kvloom_load.lengths import DEFAULT_FILE, Kind, Lengths, read_kinds
from kvloom_load.scenarios import SCENARIOS, Chat, Scenario, requests


def test_the_lengths_that_come_with_it():
    assert set(read_kinds(DEFAULT_FILE)) >= {name for scenario in SCENARIOS.values() for name, _ in scenario.mix}
    assert "turn" in read_kinds(DEFAULT_FILE)


@pytest.mark.parametrize(
    "content",
    [
        "[]",
        "{",
        '{"chat": {"prompt": {"tokens": [1], "weights": [1]}}}',
        '{"chat": {"prompt": {"tokens": [1, 2], "weights": [1]}, "output": {"tokens": [1], "weights": [1]}}}',
        '{"chat": {"prompt": {"tokens": [0], "weights": [1]}, "output": {"tokens": [1], "weights": [1]}}}',
    ],
)
def test_wrong_lengths_are_refused_by_name(tmp_path, content):
    file = tmp_path / "my.json"
    file.write_text(content)
    with pytest.raises(ValueError, match=r"my\.json: not a file of lengths"):
        read_kinds(file)


def asked(scenario: Scenario, seed: int, number: int = 200) -> list:
    source = requests(scenario, read_kinds(DEFAULT_FILE), random.Random(seed))
    return [next(source) for _ in range(number)]


def test_the_same_seed_asks_the_same():
    assert asked(SCENARIOS["steady"], 1) == asked(SCENARIOS["steady"], 1) != asked(SCENARIOS["steady"], 2)


def test_what_the_scenarios_ask_for():
    def prompts(name: str, seed: int) -> list[list[str]]:
        return [ask.request["text_input"].split() for ask in asked(SCENARIOS[name], seed)]

    shared = prompts("shared_prefix", 1) + prompts("shared_prefix", 2)
    assert len({tuple(words[:256]) for words in shared}) == 1
    assert len({tuple(words[256:]) for words in shared}) == len(shared)
    lengths = [len(words) for words in prompts("long_short", 1)]
    assert 0.1 < sum(length >= 512 for length in lengths) / len(lengths) < 0.3
    storm = asked(SCENARIOS["cancel_storm"], 1)
    cancelled = [ask for ask in storm if ask.cancel_after is not None]
    assert 0.4 < len(cancelled) / len(storm) < 0.6
    assert all(1 <= ask.cancel_after <= ask.request["max_tokens"] for ask in cancelled)
    assert all(ask.cancel_after is None for ask in asked(SCENARIOS["steady"], 1))


def test_how_many_users_there_are():
    def course(name: str, users: int) -> list[int]:
        return [SCENARIOS[name].users_at(share / 40, users) for share in range(41)]

    assert set(course("steady", 16)) == {16}
    assert sorted(set(course("ramp", 16))) == [2, 4, 6, 8, 10, 12, 14, 16]
    assert course("ramp", 16) == sorted(course("ramp", 16))
    assert course("burst", 16)[::8] == [2, 16, 2, 16, 2, 2]
    assert min(course("ramp", 1) + course("burst", 1)) == 1


def test_a_chat_sends_all_that_was_said():
    conversation = Chat(Kind(Lengths((3,), (1,)), Lengths((5,), (1,))), random.Random(0))
    first = conversation.turn().request["messages"]
    conversation.answered("Yes.")
    second = conversation.turn().request["messages"]
    assert [message["role"] for message in second] == ["user", "assistant", "user"]
    assert second[:2] == [*first, {"role": "assistant", "content": "Yes."}]
    assert len(second[2]["content"].split()) == 3
