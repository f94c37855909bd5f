import signal
from collections.abc import Iterator

import pytest

from kvloom.launch import Server
from kvloom.repository import ModelRepository
from kvloom_client import Client
from server import SETTINGS


def pytest_configure() -> None:
    # a run that is told to end takes its servers down like one that is interrupted
    signal.signal(signal.SIGTERM, signal.default_int_handler)


@pytest.fixture(scope="session")
def server() -> Iterator[Server]:
    with Server.start(ModelRepository(SETTINGS), exit_timeout_s=5) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    with Client(server.grpc_url) as client:
        yield client
