"""The environments of the peers: their folders and whether they are installed."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.models.fetch import cache_folder

REQUIREMENTS = Path(__file__).parent / "engines" / "requirements"
HOW = "make bench-peers sets it up"

OWN = "own"
"""The environment of peers that are installed with kvloom."""


@dataclass(frozen=True)
class Environment:
    """A folder for one peer, ``kvloom/peers/NAME`` in the user's cache folder.

    Attributes:
        name: the peer's name, or ``own``.
    """

    name: str

    @property
    def folder(self) -> Path:
        """The folder with all files of the peer."""
        return cache_folder("peers") / self.name

    @property
    def python(self) -> Path:
        """The Python interpreter of its driver."""
        own = self.folder / "venv" / "bin" / "python"
        return own if self.name != OWN and own.exists() else Path(sys.executable)

    def pins(self) -> list[str]:
        """Its pinned requirements. If they change, it must be set up again."""
        lines = [
            line for file in sorted(REQUIREMENTS.glob(f"{self.name}*.txt")) for line in file.read_text().splitlines()
        ]
        return [line for line in lines if not line.startswith("#")]

    def absence(self) -> str | None:
        """Why the peer can't be measured and what to do; None if it can."""
        if self.name == OWN:
            return None
        state = self.state()
        if state is None:
            return f"not set up; {HOW}"
        if state["pins"] != self.pins():
            return f"set up with other versions; {HOW}"
        return None if state["failed"] is None else f"set-up failed: {state['failed']}"

    def state(self) -> dict[str, Any] | None:
        """The result of the last set-up: ``pins`` and ``failed`` (the reason, or None). None if there was no set-up."""
        file = self.folder / "state.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def note(self, failed: str | None) -> None:
        """Write the result of a set-up."""
        (self.folder / "state.json").write_text(json.dumps({"pins": self.pins(), "failed": failed}, indent=1))


def model_path(kind: str) -> Path:
    """The default model in the form ``kind``: ``bf16`` and ``fp32`` are Hugging Face folders, see ``weights``."""
    return cache_folder("peers") / "weights" / kind
