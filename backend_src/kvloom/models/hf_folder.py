"""Reads a Hugging Face folder: config.json and safetensors, in one file or sharded with an index."""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors import SafetensorError, safe_open

from kvloom.errors import ModelError
from kvloom.models.families import Family, hf_family
from kvloom.models.fields import typed
from kvloom.models.spec import LinearScaling, Llama3Scaling, ModelSpec, RopeScaling
from kvloom.ops.linear_groups import GroupedWeight

_SINGLE = "model.safetensors"
_INDEX = "model.safetensors.index.json"
_DTYPES = ("F32", "BF16", "F16")
_ADVICE = "download the folder again"


class HfFolder:
    """One Hugging Face folder.

    Attributes:
        path: the folder.
        kind: ``hf``.
        metadata: config.json.
        spec: the model's shape.
        shapes: shape of every tensor by canonical name, without the head if the embedding is tied.

    Raises:
        ModelError: a file is missing, broken or not supported. The message does not name the folder.
        PermissionError: a file can't be read.
    """

    kind: Literal["hf"] = "hf"

    def __init__(self, path: Path):
        self.path = path
        self.metadata: dict[str, Any] = _json(path / "config.json")
        family = hf_family(self.metadata)
        self.spec = _spec(self.metadata, family)
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._places: dict[str, tuple[str, str]] = {}
        for file, names in _tensor_files(path).items():
            with _open(path / file) as tensors:
                for name in names:
                    if self._wanted(name, family):
                        self._note(name, tensors.get_slice(name))
                        self._places[_canonical(name)] = file, name

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield canonical names and weights, one at a time, as copies in ``dtype``."""
        for name in self.shapes:
            yield name, self.tensor(name, dtype)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One weight by its canonical name; see ``tensors``."""
        file, stored = self._places[name]
        with _open(self.path / file) as tensors:
            try:
                tensor = tensors.get_tensor(stored)
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{file}: tensor {stored} can't be read ({error}); {_ADVICE}") from error
            # The tensor is a view of the mapped file, which may change while the server runs
            copy: torch.Tensor = tensor.to(dtype, copy=True)
            return copy

    def stored_as(self, name: str) -> str:
        """The name of a tensor's dtype."""
        file, stored = self._places[name]
        with _open(self.path / file) as tensors:
            return str(tensors.get_slice(stored).get_dtype())

    def groups(self, name: str) -> GroupedWeight | None:
        """Always None: these files have no weights of integers in groups."""
        return None

    def _wanted(self, name: str, family: Family) -> bool:
        redundant = self.spec.tied_embeddings and _canonical(name) == "lm_head.weight"
        return not redundant and not name.endswith(family.hf_ignored)

    def _note(self, name: str, header: Any) -> None:
        canonical = _canonical(name)
        if canonical in self.shapes:
            raise ModelError(f"tensor {canonical} appears twice; {_ADVICE}")
        if header.get_dtype() not in _DTYPES:
            raise ModelError(f"tensor {canonical}: dtype {header.get_dtype()} is not supported, only {_DTYPES}")
        self.shapes[canonical] = tuple(header.get_shape())


def _canonical(name: str) -> str:
    return name.removeprefix("model.")


def _json(file: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_bytes())
    except FileNotFoundError as error:
        raise ModelError(
            f"{file.name} is missing; --model takes a GGUF file or a Hugging Face folder (config.json, safetensors)"
        ) from error
    except PermissionError:
        raise
    except OSError as error:
        raise ModelError(f"{file.name} can't be read: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"{file.name} is not JSON ({error}); {_ADVICE}") from error
    if not isinstance(value, dict):
        raise ModelError(f"{file.name} is not a JSON object; {_ADVICE}")
    return value


def _open(file: Path) -> Any:
    try:
        # The library's error for a file that may not be read is an OSError like that for a missing one
        file.open("rb").close()
        return safe_open(file, framework="pt")
    except PermissionError:
        raise
    except (SafetensorError, OSError) as error:
        raise ModelError(f"{file.name} is missing, truncated or corrupt ({error}); {_ADVICE}") from error


def _tensor_files(folder: Path) -> dict[str, list[str]]:
    """Names of the tensors in each file.

    The index only says which files there are. Those that users have list tensors that no file has (a tied head, a
    buffer), or list them in the wrong file; what is in the files counts.
    """
    if (folder / _SINGLE).exists():
        return {_SINGLE: _tensor_names(folder / _SINGLE)}
    if not (folder / _INDEX).exists():
        raise ModelError(f"has neither {_SINGLE} nor {_INDEX}; other weight formats are not supported")
    index = _json(folder / _INDEX).get("weight_map")
    if not isinstance(index, dict) or not all(isinstance(file, str) for file in index.values()):
        raise ModelError(f"{_INDEX} has no weight_map; {_ADVICE}")
    return {file: _tensor_names(folder / file) for file in sorted(set(index.values()))}


def _tensor_names(file: Path) -> list[str]:
    with _open(file) as tensors:
        return list(tensors.keys())


def _spec(config: Mapping[str, Any], family: Family) -> ModelSpec:
    config = {**family.hf_defaults, **{key: value for key, value in config.items() if value is not None}}
    hidden, heads = typed(config, "hidden_size", int), typed(config, "num_attention_heads", int)
    if heads < 1 or hidden % heads and config.get("head_dim") is None:
        raise ModelError(f"hidden_size={hidden} is not a multiple of num_attention_heads={heads}")
    theta, scaling = _rope(config)
    return ModelSpec(
        family=family.name,
        n_layers=typed(config, "num_hidden_layers", int),
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=typed(config, "num_key_value_heads", int, heads),
        head_dim=typed(config, "head_dim", int, hidden // heads),
        intermediate_size=typed(config, "intermediate_size", int),
        vocab_size=typed(config, "vocab_size", int),
        context_length=typed(config, "max_position_embeddings", int),
        norm_eps=typed(config, "rms_norm_eps", float),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_embeddings=typed(config, "tie_word_embeddings", bool),
    )


def _rope(config: Mapping[str, Any]) -> tuple[float, RopeScaling | None]:
    """The base and the scaling. Newer files have ``rope_parameters``, older ``rope_theta`` and ``rope_scaling``."""
    rope = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ModelError(f"RoPE parameters {rope} are not supported; kvloom serves one set for all layers")
    rope = {key: config[key] for key in ("rope_theta", "partial_rotary_factor") if key in config} | rope
    if typed(rope, "partial_rotary_factor", float, 1.0) != 1:
        raise ModelError(f"partial_rotary_factor={rope['partial_rotary_factor']} is not supported; kvloom serves 1.0")
    theta = typed(rope, "rope_theta", float)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return theta, None
    if kind == "linear":
        return theta, LinearScaling(typed(rope, "factor", float))
    if kind == "llama3":
        key = "original_max_position_embeddings"
        # The key may be in several places; transformers gives them this precedence
        original = {key: config["max_position_embeddings"]} | rope | {k: config[k] for k in (key,) if k in config}
        return theta, Llama3Scaling(
            factor=typed(rope, "factor", float),
            low_freq_factor=typed(rope, "low_freq_factor", float),
            high_freq_factor=typed(rope, "high_freq_factor", float),
            original_context_length=typed(original, "original_max_position_embeddings", int),
        )
    raise ModelError(f"rope_type {kind!r} is not supported; kvloom serves default, linear and llama3")
