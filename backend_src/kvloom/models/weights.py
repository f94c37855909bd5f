"""Opens and checks a model's files. GGUF files and Hugging Face folders get the same interface and tensor names."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch

from kvloom.errors import ModelError
from kvloom.models.gguf_file import GgufFile
from kvloom.models.hf_folder import HfFolder
from kvloom.models.spec import ModelSpec, tensor_shapes
from kvloom.ops.linear_groups import GroupedWeight
from kvloom.paths import not_permitted


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """An opened model. Every tensor exists and has the right shape. Weights are read on demand."""

    source: GgufFile | HfFolder

    @property
    def path(self) -> Path:
        """The GGUF file or the Hugging Face folder."""
        return self.source.path

    @property
    def kind(self) -> Literal["gguf", "hf"]:
        """The kind of file at ``path``."""
        return self.source.kind

    @property
    def spec(self) -> ModelSpec:
        """The model's shape."""
        return self.source.spec

    @property
    def metadata(self) -> dict[str, Any]:
        """GGUF's metadata (``general.*``, ``tokenizer.ggml.*`` ...) as plain values, or the folder's config.json."""
        return self.source.metadata

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield the name and weight of each of ``tensor_shapes(spec)``, in ``dtype``, in the file's order.

        There is only one at a time, so that the model is not in memory twice.

        Raises:
            ModelError: a tensor can't be read.
        """
        with _naming(self.path):
            yield from self.source.tensors(dtype)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One weight by its canonical name.

        Raises:
            ModelError: the tensor can't be read.
        """
        with _naming(self.path):
            return self.source.tensor(name, dtype)

    def stored_as(self, name: str) -> str:
        """The file's name for a tensor's type."""
        return self.source.stored_as(name)

    def groups(self, name: str) -> GroupedWeight | None:
        """A weight that the file stores as integers in groups, unchanged; None for other types."""
        with _naming(self.path):
            return self.source.groups(name)

    def load(self, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        """All of ``tensors`` at once."""
        return dict(self.tensors(dtype))


def open_model(path: Path) -> ModelFiles:
    """Open a Hugging Face folder or a GGUF file and check that it has every tensor. No weights are read.

    Raises:
        ModelError: the files are broken or not supported. The message names the path and says what to do.
    """
    with _naming(path):
        if not path.exists():
            raise ModelError("does not exist; --model takes a GGUF file or a Hugging Face folder")
        source = HfFolder(path) if path.is_dir() else GgufFile(path)
        _check(source.spec, source.shapes)
        return ModelFiles(source)


@contextmanager
def _naming(path: Path) -> Iterator[None]:
    try:
        yield
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    except PermissionError as error:
        raise not_permitted(error) from error


def _check(spec: ModelSpec, found: dict[str, tuple[int, ...]]) -> None:
    expected = tensor_shapes(spec)
    missing = [name for name in expected if name not in found]
    if missing:
        hint = ", but the config says that the embedding is not tied" if missing == ["lm_head.weight"] else ""
        raise ModelError(f"tensor {_first(missing)} is missing{hint}; the model is incomplete")
    left_over = [name for name in found if name not in expected]
    if left_over:
        raise ModelError(f"tensor {_first(left_over)} does not belong to a {spec.family} model; it is not supported")
    for name, shape in expected.items():
        if found[name] != shape:
            raise ModelError(f"tensor {name} has shape {list(found[name])}, but the model's config says {list(shape)}")


def _first(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} (and {len(names) - 1} more)"
