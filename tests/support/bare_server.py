"""A tritonserver without the launcher."""

import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvloom.launcher import access, tritonserver
from kvloom.launcher.ports import Ports
from kvloom.launcher.repository import ModelRepository
from support.server import SETTINGS, eventually
from support.tiny_models import make_tiny

DOCUMENT = Path(__file__).parents[2] / "docker" / "README.md"


@contextmanager
def bare_server(folder: Path, *more: str) -> Iterator[tuple[str, str]]:
    """Start tritonserver as docker/README.md does, with ``more`` options. Yields its HTTP and gRPC address."""
    [command] = re.findall(r"\$ tritonserver ((?:.*\\\n)*.*)", DOCUMENT.read_text())
    options = command.replace("\\\n", " ").split()
    assert options == ["--model-repository=model_repository", *access.options(shared_memory=False)]
    settings = SETTINGS | {"model": str(make_tiny(folder / "model"))}
    ModelRepository(settings).write(folder / "model_repository")
    installation = tritonserver.find(None, folder)
    ports = Ports().resolved()
    for name in ("http", "grpc", "metrics"):
        options += [f"--{name}-address={ports.host}", f"--{name}-port={getattr(ports, name)}"]
    options += [f"--backend-directory={installation.backends}", *more]
    with (folder / "log").open("wb") as log:
        running = subprocess.Popen(
            [str(installation.binary), *options],
            cwd=folder,
            env=installation.environment(os.environ),
            stdout=log,
            stderr=log,
        )
    try:
        eventually(lambda: b"Started Metrics Service" in (folder / "log").read_bytes(), within=500)
        yield f"http://{ports.address('http')}", ports.address("grpc")
    finally:
        running.terminate()
        assert running.wait(60) == 0
