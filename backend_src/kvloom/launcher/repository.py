"""The model repository for a server: a copy of kvloom's own repository with the settings of this start."""

import shutil
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from google.protobuf import text_format
from tritonclient.grpc.model_config_pb2 import ModelConfig

from kvloom.config import Settings
from kvloom.errors import LaunchError, ModelError, SettingsError
from kvloom.paths import not_permitted


def _source() -> Path:
    in_source_tree = Path(__file__).resolve().parents[3] / "model_repository"
    installed = Path(sysconfig.get_path("data")) / "share" / "kvloom" / "model_repository"
    return in_source_tree if in_source_tree.is_dir() else installed


SOURCE = _source()
"""kvloom's own repository: in the source tree if kvloom runs from there, else where its wheel has installed it."""


def parse_assignments(assignments: list[str]) -> dict[str, str]:
    """Read ``KEY=VALUE`` strings.

    Raises:
        SettingsError: a string does not have this form.
    """
    settings = {}
    for assignment in assignments:
        key, equals, value = assignment.partition("=")
        if not (key and equals):
            raise SettingsError(f"--set {assignment!r}: expected KEY=VALUE, for example --set max_running=8")
        settings[key.strip()] = value.strip()
    return settings


class ModelRepository:
    """kvloom's model repository with changed settings. They are checked; ``write`` makes a copy for a server.

    Attributes:
        settings: the settings of a server on this repository. The model is a path.
    """

    def __init__(self, settings: Mapping[str, str], source: Path = SOURCE):
        """Check the settings and find the model. Downloads the default model unless it is in the cache.

        Args:
            settings: the settings to change in the ``parameters`` of llm's config.pbtxt.
            source: the repository to copy.

        Raises:
            LaunchError: there is no repository at ``source``, or its config can't be read.
            SettingsError: a setting is unknown or malformed.
            ModelError: the model does not exist or can't be downloaded.
        """
        self._source = source
        path = source / "llm" / "config.pbtxt"
        if not path.is_file():
            raise LaunchError(
                f"no model repository at {source}: {path} is missing; give the right one with --model-repository DIR"
            )
        try:
            self._config = text_format.Parse(path.read_text(encoding="utf-8"), ModelConfig())
        except text_format.ParseError as error:
            raise LaunchError(f"{path}: {error}") from error
        parameters = {key: value.string_value for key, value in self._config.parameters.items()} | dict(settings)
        # The server gets a path, because it may run in another directory and must not download anything
        parameters["model"] = str(_resolve_model(Settings.parse(parameters).model))
        self.settings = Settings.parse(parameters)
        self.settings.check_slots(self._config.sequence_batching.oldest.max_candidate_sequences)
        for key, value in parameters.items():
            self._config.parameters[key].string_value = value

    def write(self, target: Path, **changed: str) -> None:
        """Write a copy to ``target``, which must not exist yet. The copy also gets the settings ``changed``."""
        config = ModelConfig()
        config.CopyFrom(self._config)
        for key, value in changed.items():
            config.parameters[key].string_value = value
        shutil.copytree(self._source, target, ignore=shutil.ignore_patterns("__pycache__"))
        (target / "llm" / "config.pbtxt").write_text(text_format.MessageToString(config), encoding="utf-8")


def _resolve_model(model: str) -> Path:
    if model == "default":
        # Imported here, because only this case needs it and its imports are slow
        from kvloom.models.fetch import default_model

        return default_model().absolute()
    path = Path(model).expanduser().absolute()
    try:
        exists = path.exists()
    except PermissionError as error:
        raise not_permitted(error) from error
    if not exists:
        raise ModelError(
            f"model {model!r}: {path} does not exist; give a Hugging Face folder, a GGUF file or 'default'"
        )
    return path
