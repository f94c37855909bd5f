import os
import signal
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
import torch

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import ModelRepository
from kvloom.models.fetch import cache_folder
from kvloom.ops.native import stop_using_native, use_native
from kvloom_client import Client
from support.compiled import add_options, apply_options, use_compiled
from support.server import SETTINGS

if TYPE_CHECKING:
    from support.tiny_server import Tiny


MACHINES = ("native", "haswell")
"""Whose instructions the C++ ops are tested with: this machine's, and AVX2 alone."""


LONG = {"client", "docker", "launcher", "load", "serving", "tests"}
"""Folders whose tests take longest."""


def pytest_addoption(parser: pytest.Parser) -> None:
    add_options(parser)


def pytest_configure(config: pytest.Config) -> None:
    # a run that is told to end takes its servers down like one that is interrupted
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # tests run side by side, and OpenMP's threads spin: more of them than cores make everything many times slower
    torch.set_num_threads(1)
    os.environ["OMP_NUM_THREADS"] = "1"
    apply_options(config)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    # where processes share the files, those with the longest tests come first, and none of them is waited for alone
    items.sort(key=lambda item: item.path.parent.name not in LONG)


def pytest_sessionstart(session: pytest.Session) -> None:
    if not hasattr(session.config, "workerinput"):
        # before the workers begin, each of which would build them
        for machine in MACHINES:
            use_native(cache_folder("ops"), machine)
        stop_using_native()


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server.start(ModelRepository(SETTINGS), exit_timeout_s=5) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> "Tiny":
    # not at the top: it brings transformers, which most tests do without
    from support.tiny_server import Tiny

    return Tiny(tmp_path_factory.mktemp("tiny") / "model")


@pytest.fixture(params=["torch", "C++"])
def torch_or_native(request) -> Iterator[None]:
    """The ops in either form."""
    if request.param == "C++":
        use_compiled()
    yield
    stop_using_native()
