"""The model repository that a server is started on: a copy of kvloom's own, with the settings of this start."""

import shutil
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from kvloom.config import Settings
from kvloom.errors import LaunchError, ModelError, SettingsError

SOURCE = Path(__file__).resolve().parents[2] / "model_repository"
"""The repository in the source tree that kvloom is installed from."""


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """Read ``KEY=VALUE`` strings.

    Raises:
        SettingsError: one is not of that form.
    """
    settings = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise SettingsError(f"--set {assignment!r}: expected KEY=VALUE, for example --set max_running=8")
        settings[key.strip()] = value.strip()
    return settings


def load_config(repository: Path, changes: Mapping[str, str]) -> ModelConfig:
    """llm's configuration with changed settings; ``model`` becomes the absolute path of a file or folder.

    Fetches the default model if it is wanted and not in the cache yet.

    Raises:
        LaunchError: there is no such repository, or its config can't be read.
        SettingsError: a setting is unknown or malformed.
        ModelError: the model does not exist or could not be fetched.
    """
    path = repository / "llm" / "config.pbtxt"
    if not path.is_file():
        raise LaunchError(
            f"no model repository at {repository}: {path} is missing; name it with --model-repository DIR"
        )
    try:
        config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
    except text_format.ParseError as error:
        raise LaunchError(f"{path}: {error}") from error
    parameters = {key: value.string_value for key, value in config.parameters.items()} | dict(changes)
    settings = Settings.parse(parameters)
    parameters["model"] = str(_resolve_model(settings.model))
    for key, value in parameters.items():
        config.parameters[key].string_value = value
    return config


def write(repository: Path, config: ModelConfig, target: Path) -> None:
    """Copy ``repository`` to ``target``, which does not exist yet, with ``config`` for llm."""
    shutil.copytree(repository, target, ignore=shutil.ignore_patterns("__pycache__"))
    (target / "llm" / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


def _resolve_model(model: str) -> Path:
    if model == "default":
        # needed here only, and fetching brings its own imports
        from kvloom.fetch import default_model

        return default_model().absolute()
    path = Path(model).expanduser().absolute()
    if not path.exists():
        raise ModelError(
            f"model {model!r}: {path} does not exist; give a Hugging Face folder, a GGUF file or 'default'"
        )
    return path
