"""The configurations of the server that `compare` compares, and how to start a server with one."""

import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from kvloom.launcher.launch import Server
from kvloom.launcher.repository import SOURCE, ModelRepository
from kvloom_load.drive import UserName
from kvloom_load.scenarios import ScenarioName

ComparisonName = Literal["max_running", "prefix_cache", "batcher_delay", "conversations"]


@dataclass(frozen=True)
class Configuration:
    """A configuration of the server.

    Attributes:
        name: its name in the report.
        settings: kvloom's settings that differ from their defaults.
        batcher_delay_us: how long Triton's dynamic batcher of `generate` delays a request to form a larger batch.
        user: the class of users; None for the comparison's.
    """

    name: str = "default"
    settings: Mapping[str, str] = field(default_factory=dict)
    batcher_delay_us: int = 0
    user: UserName | None = None


@dataclass(frozen=True)
class Comparison:
    """Configurations, and the load that shows their difference."""

    configurations: tuple[Configuration, ...]
    scenario: ScenarioName = "steady"
    user: UserName = "GrpcUser"


COMPARISONS: dict[ComparisonName, Comparison] = {
    "max_running": Comparison(
        (
            Configuration("max_running=1", {"max_running": "1"}),
            Configuration("max_running=32", {"max_running": "32"}),
        ),
    ),
    "prefix_cache": Comparison(
        (
            Configuration("prefix_cache=false", {"prefix_cache": "false"}),
            Configuration("prefix_cache=true", {"prefix_cache": "true"}),
        ),
        scenario="shared_prefix",
    ),
    "batcher_delay": Comparison(
        (
            Configuration("generate: no delay"),
            Configuration("generate: delay of 5 ms", batcher_delay_us=5000),
        ),
        user="SseUser",
    ),
    "conversations": Comparison(
        (
            Configuration("the whole chat, no prefix cache", {"prefix_cache": "false"}, user="ChatUser"),
            Configuration("the whole chat", user="ChatUser"),
            Configuration("only what is new", user="ConversationUser"),
        ),
        user="ConversationUser",
    ),
}


@contextmanager
def serve(configuration: Configuration, settings: Mapping[str, str]) -> Iterator[Server]:
    """Run a server with this configuration on free ports. ``settings`` are those of all configurations."""
    with tempfile.TemporaryDirectory(prefix="kvloom-load-") as folder:
        source = SOURCE
        if configuration.batcher_delay_us:
            source = Path(folder, "source")
            shutil.copytree(SOURCE, source)
            _delay(source / "generate" / "config.pbtxt", configuration.batcher_delay_us)
        repository = ModelRepository({**settings, **configuration.settings}, source)
        with Server.start(repository, exit_timeout_s=5) as server:
            yield server


def _delay(path: Path, microseconds: int) -> None:
    config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    config.dynamic_batching.max_queue_delay_microseconds = microseconds
    path.write_text(text_format.MessageToString(config), encoding="utf-8")
