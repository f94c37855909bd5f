"""Where the peers' environments are, and whether they are there."""

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvloom.models.fetch import cache_folder

REQUIREMENTS = Path(__file__).parent / "engines" / "requirements"
HOW = "make bench-peers sets it up"

OWN = "own"
"""Peers that are in kvloom's own environment."""


@dataclass(frozen=True)
class Environment:
    """A folder for one peer, ``kvloom/peers/NAME`` in the user's cache folder.

    Attributes:
        name: of the peer, or ``own``.
    """

    name: str

    @property
    def folder(self) -> Path:
        """Everything that was made for the peer."""
        return cache_folder("peers") / self.name

    @property
    def python(self) -> Path:
        """The interpreter that its driver runs in."""
        own = self.folder / "venv" / "bin" / "python"
        return own if self.name != OWN and own.exists() else Path(sys.executable)

    def pins(self) -> list[str]:
        """What it is made from; other pins make it anew."""
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
        """What the last set-up left: ``pins``, ``failed`` (why, or None); None if there was none."""
        file = self.folder / "state.json"
        return json.loads(file.read_text()) if file.is_file() else None

    def note(self, failed: str | None) -> None:
        """Write down how the set-up ended."""
        (self.folder / "state.json").write_text(json.dumps({"pins": self.pins(), "failed": failed}, indent=1))


def model_path(kind: str) -> Path:
    """The default model in the form ``kind``: ``bf16`` and ``fp32`` are Hugging Face folders, see ``weights``."""
    return cache_folder("peers") / "weights" / kind
