"""Faults that users of such servers reported, against the real server: lengths, validation, sampling (H05-H11)."""

import json
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvloom.request import MAX_BIASES, MAX_CHARACTERS, MAX_STOP_IDS, MAX_TEXTS
from kvloom_client import Client, InvalidArgument, RequestFailed
from support.http_door import answer, post, refusal
from support.server import assert_idle, canary

GREEDY = {"temperature": 0.0, "ignore_eos": True}
MAX_JSON = 2**20
"""The most characters of the sampling JSON."""

HEALTHY = {"text_input": "What is deep learning?", "max_tokens": 40, **GREEDY}


@pytest.fixture(autouse=True)
def _healthy(server):
    yield
    canary(server)
    assert_idle(server)


@pytest.fixture(scope="module")
def alone(server):
    """What the healthy stream of these tests says when it is alone."""
    with Client(server.grpc_url) as client:
        return client.generate(**HEALTHY).text


def beside_a_healthy_stream(client: Client, alone: str, bad) -> None:
    """Run ``bad()`` while an answer streams; the answer is what it is alone."""
    with ThreadPoolExecutor(1) as pool:
        stream = client.stream(**HEALTHY)
        first = next(stream).text
        rest = pool.submit(lambda: "".join(chunk.text for chunk in stream))
        bad()
        assert first + rest.result() == alone


# H05


def test_h05_max_tokens_zero_is_refused_and_one_gives_one(client):
    for extra in ({}, {"sampling_parameters": {"logprobs": 1}, "return_logprobs": True}):
        with pytest.raises(InvalidArgument, match="INVALID_ARG: max_tokens: "):
            client.generate(text_input="Hello", max_tokens=0, **extra)
    one = client.generate(text_input="Hello", max_tokens=1, **GREEDY)
    assert (one.num_output_tokens, one.finish_reason) == (1, "length")


# H06


def test_h06_too_long_prompts_are_refused_at_once(client, alone):
    def bad() -> None:
        for length in (8192, 8193, 4 * 8192):
            with pytest.raises(InvalidArgument, match=r"INVALID_ARG: prompt: .*8192"):
                client.generate(input_ids=[100] * length, max_tokens=1)
        assert client.generate(text_input="Hello", max_tokens=10**9, sampling_parameters={"stop": ["e"]}).text

    beside_a_healthy_stream(client, alone, bad)


# H07

BAD_JSON = {
    "temperature": ["NaN", "Infinity", "-3", '"warm"', "true", "101", '"101"'],
    "top_p": ["-0.1", "7", "NaN"],
    "min_p": ["-1", "2", "NaN"],
    "top_k": ["-5", "1.5"],
    "repetition_penalty": ["NaN", "1e9", "0", "1e400"],
    "presence_penalty": ["NaN", "1e9"],
    "frequency_penalty": ["NaN", "1e9"],
    "seed": ["-1", str(2**64), "1.5", '"1.5"', '"-1"'],
    "tempurature": ["1", "null"],
    "n": ["0", "2"],
    "stop": ["7", "[7]"],
    "max_tokens": ["0", "-1", "1.5"],
    "min_tokens": ["-1", "1000"],
    "logprobs": ["-1", "21"],
}


def test_h07_wrong_sampling_values_in_json(client, server, alone):
    def bad() -> None:
        for key, values in BAD_JSON.items():
            for value in values:
                body = {"text_input": "Hello", "sampling_parameters": f'{{"{key}": {value}}}'}
                assert refusal(server, body).startswith(f"INVALID_ARG: {key}: "), (key, value)

    beside_a_healthy_stream(client, alone, bad)


BAD_TENSORS = [
    ("temperature", -3.0),
    ("temperature", 101),
    ("top_p", -0.1),
    ("top_p", 7),
    ("min_p", 2),
    ("top_k", -5),
    ("repetition_penalty", 0),
    ("presence_penalty", 1e9),
    ("beam_width", 2),
    ("length_penalty", 2),
    ("max_tokens", 0),
]
TRITON_REFUSES = [
    ("temperature", '"0.7"'),
    ("temperature", "true"),
    ("temperature", "null"),
    ("temperature", "1e400"),
    ("top_k", '"5"'),
    ("seed", "-1"),
    ("seed", str(2**64)),
]


def test_h07_wrong_sampling_values_as_tensors(client, server, alone):
    def bad() -> None:
        for key, value in BAD_TENSORS:
            assert refusal(server, {"text_input": "Hello", key: value}).startswith(f"INVALID_ARG: {key}: "), key
        assert refusal(server, '{"text_input": "Hello", "temperature": NaN}')
        for key, value in TRITON_REFUSES:
            assert refusal(server, f'{{"text_input": "Hello", "{key}": {value}}}'), (key, value)
        # an unknown scalar becomes a request parameter, an unknown list is Triton's to refuse
        assert refusal(server, {"text_input": "Hello", "tempurature": 1}).startswith("INVALID_ARG: tempurature: ")
        assert refusal(server, {"text_input": "Hello", "stopp": ["a"]})

    beside_a_healthy_stream(client, alone, bad)


def test_large_sampling_values(client, server, alone):
    most = {
        "stop": ["§" * 32] * MAX_TEXTS,
        "bad_words": ["§" * 32] * MAX_TEXTS,
        "stop_token_ids": [7] * MAX_STOP_IDS,
        "logit_bias": {str(token): 0.5 for token in range(MAX_BIASES)},
    }
    more = {
        "stop": [["a"] * (MAX_TEXTS + 1), "a" * (MAX_CHARACTERS + 1), ["a"] * 50_000],
        "bad_words": [["a"] * (MAX_TEXTS + 1), ["a" * MAX_CHARACTERS, "b"]],
        "stop_token_ids": [[7] * (MAX_STOP_IDS + 1)],
        "logit_bias": [{str(token): 0.5 for token in range(MAX_BIASES + 1)}],
        "sampling_parameters": ["a" * MAX_JSON],
    }

    def bad() -> None:
        for key, values in more.items():
            for value in values:
                body = {"text_input": "Hello", "sampling_parameters": json.dumps({key: value})}
                assert refusal(server, body).startswith(f"INVALID_ARG: {key}: "), key
        words = {"text_input": "Hello", "stop_words": ["a"] * (MAX_TEXTS + 1)}
        assert refusal(server, words).startswith("INVALID_ARG: stop: at most 512 strings, not 513")
        assert client.generate(text_input="Hello", sampling_parameters=most, max_tokens=2).num_output_tokens == 2

    beside_a_healthy_stream(client, alone, bad)


# H08


def test_h08_empty_prompts(server, client):
    assert refusal(server, {"text_input": ""}).startswith("INVALID_ARG: text_input: ")
    assert refusal(server, {"messages": "[]"}).startswith("INVALID_ARG: messages: ")
    with pytest.raises(InvalidArgument, match="INVALID_ARG: "):
        client.generate(input_ids=[], max_tokens=1)
    empty_content = [{"role": "user", "content": ""}]
    assert client.generate(messages=empty_content, max_tokens=2, **GREEDY).num_output_tokens == 2
    assert client.generate(text_input=" ", max_tokens=2, **GREEDY).num_output_tokens == 2


# H09


@pytest.mark.parametrize("bias", ['{"49157": -100}', '{"-1": 5}', '{"AI": -100}', '{"5": NaN}', '{"5": 101}', "[5]"])
def test_h09_wrong_logit_bias(server, client, bias):
    body = {"text_input": "Hello", "sampling_parameters": f'{{"logit_bias": {bias}}}'}
    assert refusal(server, body).startswith("INVALID_ARG: logit_bias: ")
    assert client.generate(text_input="Hello", max_tokens=1).num_output_tokens == 1


def test_logit_bias_decides(client):
    forced = client.generate(text_input="Hello", max_tokens=3, logit_bias={"260": 100.0}, **GREEDY)
    assert list(forced.token_ids) == [260] * 3


# H10


def test_h10_seeded_answers_do_not_depend_on_neighbours(client):
    seeded = {"text_input": "The capital of France is", "seed": 42, "temperature": 0.8, "max_tokens": 16}
    expected = client.generate(**seeded).token_ids

    def neighbour(number: int) -> None:
        sampling = [{}, {"temperature": 0.0}, {"top_k": 5}, {"top_p": 0.3}, {"frequency_penalty": 1.5}, {"seed": 1}]
        client.generate(text_input="The capital of Germany is", max_tokens=20, **sampling[number % 6])

    with ThreadPoolExecutor(8) as pool:
        for neighbours in (1, 1, 1, 1, 7):
            others = [pool.submit(neighbour, number) for number in range(neighbours)]
            assert pool.submit(lambda: client.generate(**seeded)).result().token_ids == expected
            [other.result() for other in others]
        others = [pool.submit(neighbour, number) for number in range(3)]
        time.sleep(0.3)
        assert client.generate(**seeded).token_ids == expected
        [other.result() for other in others]


# H11


def test_h11_penalties_stay_with_their_request(client):
    plain = {"text_input": "A list:", "max_tokens": 24, **GREEDY}
    penal = {"text_input": "1 1 2 3 5 8 13 21, 1 1 2 3 5 8 13", "max_tokens": 24, "frequency_penalty": 1.05, **GREEDY}
    plain_alone, penal_alone = client.generate(**plain).token_ids, client.generate(**penal).token_ids
    for others in (1, 3):
        with ThreadPoolExecutor(others + 1) as pool:
            penalized = [pool.submit(lambda: client.generate(**penal)) for _ in range(others)]
            assert client.generate(**plain).token_ids == plain_alone
            assert all(other.result().token_ids == penal_alone for other in penalized)
    assert penal_alone != client.generate(**{**penal, "frequency_penalty": 0.0}).token_ids


# precedence and outputs


def test_a_tensor_beats_the_json_beats_a_parameter(server):
    body = {"text_input": "Hello", "return_num_output_tokens": True, "temperature": 0, "ignore_eos": True}
    both = {**body, "max_tokens": 3, "sampling_parameters": json.dumps({"max_tokens": 5, "ignore_eos": True})}
    assert answer(server, **both)["num_output_tokens"] == 3
    # `ignore_eos` has no tensor: over HTTP it is a parameter
    json_only = {**body, "sampling_parameters": json.dumps({"max_tokens": 5, "ignore_eos": True})}
    assert answer(server, **json_only)["num_output_tokens"] == 5
    assert refusal(server, {**body, "ignore_eos": 7, "max_tokens": 2}).startswith("INVALID_ARG: ignore_eos: ")
    beaten = {**body, "ignore_eos": 7, "max_tokens": 2, "sampling_parameters": '{"ignore_eos": true}'}
    assert answer(server, **beaten)["num_output_tokens"] == 2


def test_both_names_of_a_key_at_once_are_refused(server):
    assert refusal(server, {"text_input": "a", "seed": 1, "random_seed": 2}).startswith("INVALID_ARG: random_seed: ")


def test_echo(server):
    text = {"text_input": "The capital city of France is", "temperature": 0, "max_tokens": 1}
    assert answer(server, **text)["text_output"] == "The capital city of France is Paris"
    assert answer(server, **text, exclude_input_in_output=True)["text_output"] == " Paris"


def test_outputs_only_where_asked_for(server):
    request = {"text_input": "The capital city of France is", "temperature": 0, "max_tokens": 3}
    assert set(answer(server, **request)) == {"model_name", "model_version", "text_output"}
    names = ("finish_reason", "num_input_tokens", "num_output_tokens", "cumulative_logprob", "token_ids", "usage")
    found = answer(server, **request, **{f"return_{name}": True for name in (*names, "logprobs")}, logprobs=2)
    assert {*names, "logprobs"} < set(found)
    entries, usage = json.loads(found["logprobs"]), json.loads(found["usage"])
    assert [entry["id"] for entry in entries] == found["token_ids"] == [7042, 30, 198]
    assert "".join(entry["text"] for entry in entries) == " Paris.\n"
    assert sum(entry["logprob"] for entry in entries) == pytest.approx(found["cumulative_logprob"], abs=1e-4)
    assert all(entry["top"][0]["id"] == entry["id"] and len(entry["top"]) == 2 for entry in entries)
    expected = {"prompt_tokens": 6, "cached_tokens": 0, "generated_tokens": 3, "kv_dtype": "fp32", "preemptions": 0}
    assert expected.items() <= usage.items()
    assert min(usage["queue_ms"], usage["prefill_ms"], usage["decode_ms"]) >= 0
    assert (found["finish_reason"], found["num_input_tokens"], found["num_output_tokens"]) == ("length", 6, 3)


def test_deadline_ends_an_answer_with_what_there_is(client):
    begin = time.monotonic()
    late = client.generate(text_input="Count:", max_tokens=2000, deadline_ms=1500, **GREEDY)
    assert time.monotonic() - begin > 1.4
    assert late.finish_reason == "deadline"
    assert 0 < late.num_output_tokens < 200


def test_what_the_cache_can_not_do_is_refused_by_name(server):
    for kv, key in [({"dtype": "int8"}, "dtype"), ({"policy": "sliding"}, "policy"), ({"window": 5}, "window")]:
        assert refusal(server, {"text_input": "a", "kv": json.dumps(kv)}).startswith(f"INVALID_ARG: kv.{key}: ")
    assert answer(server, text_input="a", max_tokens=1, kv=json.dumps({"dtype": "fp32", "policy": "full"}))


def test_exactly_one_prompt(server):
    assert refusal(server, {"text_input": "a", "messages": "[]"}).startswith("INVALID_ARG: inputs: send exactly one")
    assert refusal(server, {"temperature": 0}).startswith("INVALID_ARG: inputs: send exactly one")


def test_control_through_llm(client):
    assert client.control("ping").items() >= {"op": "ping", "ok": True}.items()
    assert client.control("flush").keys() == {"op", "ok", "blocks"}
    with pytest.raises(RequestFailed, match="NOT_FOUND: conversation nobody"):
        client.control("status", conversation="nobody")
    with pytest.raises(InvalidArgument, match="INVALID_ARG: op: "):
        client.control("jump")


def test_control_through_generate_is_ping_only(server):
    status, text = post(server, {"control": '{"op": "ping"}'})
    assert status == 200
    assert json.loads(json.loads(text)["text_output"]).items() >= {"op": "ping", "ok": True}.items()
    assert refusal(server, {"control": '{"op": "flush"}'}).startswith("INVALID_ARG: control: ")


# K09


def test_k09_numbers_and_booleans_may_be_strings_and_null_is_absent(server, client):
    asked = {"max_tokens": 6, "min_tokens": 6, "temperature": 0.0, "ignore_eos": True, "stop": "5"}
    written = {"max_tokens": "6", "min_tokens": " 6", "temperature": "0.0", "ignore_eos": "True", "stop": "5"}
    written |= {"top_p": None, "n": None, "logit_bias": None}
    expected = client.generate(text_input="Hello", sampling_parameters=asked)
    assert expected.num_output_tokens == 6
    assert client.generate(text_input="Hello", sampling_parameters=written).text == expected.text
    body = {"text_input": "Hello", "sampling_parameters": json.dumps(written), "kv": '{"retain_s": "0"}'}
    status, text = post(server, body)
    assert status == 200, text
    assert json.loads(text)["text_output"] == "Hello" + expected.text


@pytest.mark.parametrize(
    ("key", "text"), [("max_tokens", "six"), ("max_tokens", "6.5"), ("temperature", "nan"), ("ignore_eos", "1")]
)
def test_k09_what_is_no_number_is_refused_by_its_key(client, key, text):
    with pytest.raises(InvalidArgument, match=f"^INVALID_ARG: {key}: Input should be a "):
        client.generate(text_input="Hello", sampling_parameters={key: text})
