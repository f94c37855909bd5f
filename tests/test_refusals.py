"""What a refusal leaves behind: nothing. Triton's objects must be freed while its stub lives."""

import gc
import weakref
from collections.abc import Iterator

import pytest

from kvloom.errors import InvalidArgument
from kvloom.request import MAX_CHARACTERS, SamplingParams
from kvloom.serving.sampling import validate


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
