from collections.abc import Callable
from pathlib import Path

import pytest

from support.engine_driver import Driver
from support.tiny_models import make_tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a context of 2048 tokens."""
    return make_tiny(tmp_path_factory.mktemp("model"), max_position_embeddings=2048)


@pytest.fixture(scope="module")
def stateless(model: Path) -> Callable[..., list[int]]:
    """Answers a whole history in one request: the reference for every conversation."""
    driver = Driver(model, kv_blocks=256, prefix_cache="false")
    return lambda ids, **params: driver.answer(ids, **{"max_tokens": 8, **params}).ids
