"""What a refusal says, and what it leaves behind: nothing. Triton's objects must be freed while its stub lives."""

import gc
import json
import re
import weakref
from collections.abc import Iterator
from types import SimpleNamespace

import numpy as np
import pytest

from kvloom.errors import InvalidArgument
from kvloom.request import MAX_CHARACTERS, SamplingParams
from kvloom.serving.control import read_control
from kvloom.serving.inputs import read, validate
from kvloom.serving.interface import INPUTS
from kvloom.serving.options import KvOptions, read_kv
from kvloom.serving.parser import sampling_params


class Held:
    """Stands for a request of Triton's, which the refusing frames know."""


@pytest.fixture
def no_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    yield
    gc.enable()


@pytest.mark.parametrize("keys", [{"temperature": -1}, {"stop": "a" * (MAX_CHARACTERS + 1)}, {"odd": 1}])
def test_a_refused_request_is_freed_at_once(no_collection, keys):
    def refuse() -> "weakref.ref[Held]":
        held = Held()
        try:
            validate(SamplingParams, keys)
        except InvalidArgument:
            return weakref.ref(held)
        raise AssertionError("not refused")

    assert refuse()() is None


@pytest.mark.parametrize("key", [*KvOptions.model_fields, "retain", "kv.dtype", "max_tokens"])
@pytest.mark.parametrize("wrong", [[], {}, "odd", True, -7])
def test_what_is_wrong_in_kv_is_named_as_kvs(key, wrong):
    with pytest.raises(InvalidArgument, match=rf"^INVALID_ARG: kv\.{re.escape(key)}: "):
        read_kv({"kv": np.array([[json.dumps({key: wrong}).encode()]], dtype=object)}, "fp32")


@pytest.mark.parametrize(
    ("kv", "message"),
    [
        ({"policy": "sliding"}, "kv.policy: Input should be 'auto' or 'full'"),
        ({"dtype": "int8"}, "kv.dtype: Input should be 'auto', 'fp32' or 'bf16'"),
        ({"dtype": "bf16"}, "kv.dtype: 'bf16': this server's cache is fp32 (setting kv_dtype)"),
        ({"window": 64}, "kv.window: unknown key; known: dtype, policy, retain_s"),
    ],
)
def test_a_refused_cache_option_offers_only_what_there_is(kv, message):
    with pytest.raises(InvalidArgument) as refused:
        read_kv({"kv": np.array([[json.dumps(kv).encode()]], dtype=object)}, "fp32")
    assert str(refused.value) == f"INVALID_ARG: {message}"


@pytest.mark.parametrize("value", [json.dumps("\ud800"), 300 * "[" + 300 * "]"], ids=["surrogate", "nested"])
def test_json_that_can_not_be_checked_is_named_by_its_input(value):
    for name, read_it in (
        ("kv", lambda inputs: read_kv(inputs, "fp32")),
        ("control", read_control),
        ("sampling_parameters", lambda inputs: sampling_params(inputs, {}, 100)),
    ):
        with pytest.raises(InvalidArgument, match=f"^INVALID_ARG: {name}: Invalid JSON"):
            read_it({name: np.array([[f'{{"key": {value}}}'.encode()]], dtype=object)})


@pytest.mark.parametrize(
    ("name", "hint"), [("stop_words", "; the key is stop"), ("min_length", "; the key is min_tokens"), ("kv", "")]
)
def test_an_input_among_the_sampling_keys_is_told(name, hint):
    tensors = {"sampling_parameters": np.array([[json.dumps({name: 1}).encode()]], dtype=object)}
    with pytest.raises(InvalidArgument) as refused:
        sampling_params(tensors, {}, 100)
    assert str(refused.value) == f"INVALID_ARG: {name}: is an input of its own, not a sampling key{hint}"


def test_an_unknown_key_is_told_all_that_it_may_have_meant():
    declared = [own.name for own in INPUTS]
    for odd in ("text_inptu", "deadlin_ms"):
        for inputs, parameters in (({}, {odd: 1}), ({"sampling_parameters": json.dumps({odd: 1})}, {})):
            tensors = {name: np.array([[value.encode()]], dtype=object) for name, value in inputs.items()}
            with pytest.raises(InvalidArgument, match=f"^INVALID_ARG: {odd}: unknown key; known: ") as refused:
                sampling_params(tensors, parameters, 100)
            assert {*SamplingParams.model_fields, *declared} <= set(re.findall(r"\w+", str(refused.value)))


class Given:
    """A tensor as Triton gives it."""

    def __init__(self, name: str, shape: tuple[int, ...]):
        self._name, self._array = name, np.zeros(shape, np.int32)

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


@pytest.mark.parametrize(
    ("name", "shape", "wrong"),
    [
        ("end_id", (1, 1), "kvloom has no such input, though the model's config.pbtxt declares it"),
        ("max_tokens", (1, 2), "has shape [1, 2]; send [1, 1]"),
        ("max_tokens", (1,), "has shape [1]; send [1, 1]"),
        ("input_ids", (2, 3), "has shape [2, 3]; send [1, n]"),
        ("input_ids", (1, 3), ""),
    ],
)
def test_an_input_that_is_not_as_declared_is_refused_by_name(name, shape, wrong):
    request = SimpleNamespace(inputs=lambda: [Given(name, shape)])
    if wrong:
        with pytest.raises(InvalidArgument) as refused:
            read(request)
        assert str(refused.value) == f"INVALID_ARG: {name}: {wrong}"
    else:
        assert list(read(request)) == [name]
