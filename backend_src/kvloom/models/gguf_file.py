"""Reads a GGUF file: memory-maps it, converts its metadata to plain values, dequantizes one tensor at a time."""

import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch

from kvloom.errors import ModelError
from kvloom.models.families import Family, gguf_family
from kvloom.models.fields import typed
from kvloom.models.gguf_groups import GROUPED, grouped_weight
from kvloom.models.spec import LinearScaling, ModelSpec, RopeScaling, tensor_shapes
from kvloom.ops.linear_groups import GroupedWeight

_OTHER_FILES = "use a file of another type, such as Q8_0, Q4_K_M or F16"
_ROPE_FACTORS = "rope_freqs.weight"
_ADVICE = "download or convert it again"


class GgufFile:
    """One GGUF file.

    Attributes:
        path: the file.
        kind: ``gguf``.
        metadata: every key as a plain Python value, the tokenizer's arrays as lists.
        spec: the model's shape.
        shapes: shape of every tensor in the file, by canonical name. Tensors that the family does not have keep the
            name in the file.

    Raises:
        ModelError: the file is broken or not supported. The message does not name the path.
        PermissionError: it can't be read.
    """

    kind: Literal["gguf"] = "gguf"

    def __init__(self, path: Path):
        self.path = path
        reader = _read(path)
        self.metadata: dict[str, Any] = _metadata(reader)
        self._family = gguf_family(self.metadata)
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        factors = tensors.pop(_ROPE_FACTORS, None)
        self.spec = _spec(self.metadata, self._family, tensors, None if factors is None else _values(factors))
        names = _canonical_names(self.spec, self._family)
        self._tensors = {
            names.get(name, name): tensor
            for name, tensor in tensors.items()
            if not name.endswith(self._family.gguf_ignored)
        }
        self.shapes = {name: _shape(tensor) for name, tensor in self._tensors.items()}

    def tensors(self, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield canonical names and weights, one at a time, as copies in ``dtype``.

        Raises:
            ModelError: a tensor has a quantized type that can't be dequantized.
        """
        for name in self._tensors:
            yield name, self.tensor(name, dtype)

    def tensor(self, name: str, dtype: torch.dtype) -> torch.Tensor:
        """One weight by its canonical name; see ``tensors``."""
        return torch.from_numpy(_values(self._tensors[name], self._data(name))).to(dtype)

    def stored_as(self, name: str) -> str:
        """The name of a tensor's type in the file."""
        return str(self._tensors[name].tensor_type.name)

    def groups(self, name: str) -> GroupedWeight | None:
        """A copy of a weight that the file stores as integers in groups; None for other types."""
        kind = self.stored_as(name)
        return grouped_weight(self._data(name), kind) if kind in GROUPED else None

    def _data(self, name: str) -> np.ndarray:
        """A tensor's raw data. The halves of its heads are in order."""
        data = self._tensors[name].data
        heads = self._interleaved_heads(name)
        return data if heads is None else _halves(data, heads)

    def _interleaved_heads(self, name: str) -> int | None:
        if self._family.gguf_permutes_qk:
            if name.endswith("self_attn.q_proj.weight"):
                return self.spec.n_heads
            if name.endswith("self_attn.k_proj.weight"):
                return self.spec.n_kv_heads
        return None


class _Reader(gguf.GGUFReader):
    """The library's reader, but arrays are read at once.

    The library makes several memory-mapped views for every entry, which takes seconds for a vocabulary.
    ``ReaderField.contents()`` works on both forms.
    """

    def _build_tensors(self, start_offs: int, fields: list[gguf.ReaderField]) -> None:
        for field in fields:
            name, kind = bytes(field.parts[1]).decode(errors="replace"), int(field.parts[4][0])
            if kind not in iter(gguf.GGMLQuantizationType):
                raise ModelError(f"tensor {name} has GGUF type {kind}, which is not supported; {_OTHER_FILES}")
        super()._build_tensors(start_offs, fields)

    def _get_field_parts(
        self, orig_offs: int, raw_type: int
    ) -> tuple[int, list[np.ndarray], list[int], list[gguf.GGUFValueType]]:
        if raw_type != gguf.GGUFValueType.ARRAY:
            return super()._get_field_parts(orig_offs, raw_type)
        kind = gguf.GGUFValueType(int(self._get(orig_offs, np.uint32)[0]))
        count = int(self._get(orig_offs + 4, np.uint64)[0])
        start = orig_offs + 12
        if kind == gguf.GGUFValueType.STRING:
            size, parts = self._strings(start, count)
        elif kind in self.gguf_scalar_to_np:
            values = self._get(start, self.gguf_scalar_to_np[kind], count)
            size, parts = values.nbytes, [values]
        else:
            return super()._get_field_parts(orig_offs, raw_type)
        return 12 + size, parts, list(range(len(parts))), [gguf.GGUFValueType.ARRAY, kind]

    def _strings(self, start: int, count: int) -> tuple[int, list[np.ndarray]]:
        data = np.asarray(self.data)  # slicing a plain array is many times cheaper than slicing a memmap
        length_at = struct.Struct("<Q").unpack_from
        buffer, parts, offset = data.data, [], start
        for _ in range(count):
            (length,) = length_at(buffer, offset)
            parts.append(data[offset + 8 : offset + 8 + length])
            offset += 8 + length
        return offset - start, parts


def _read(path: Path) -> _Reader:
    try:
        with path.open("rb") as file:
            head = file.read(8)
        if head[:4] != b"GGUF":
            raise ModelError("not a GGUF file; --model takes a GGUF file or a Hugging Face folder")
        version = int.from_bytes(head[4:], "little")
        if version not in (2, 3):
            raise ModelError(f"GGUF version {version} is not supported, only 2 and 3 (little endian); {_ADVICE}")
        return _Reader(path)
    except PermissionError:
        raise
    except OSError as error:
        raise ModelError(f"can't be read: {error.strerror}") from error
    # The library raises these if the file ends too early or contains invalid values
    except (ValueError, IndexError, KeyError, OverflowError, struct.error) as error:
        raise ModelError(f"the GGUF file is truncated or corrupt ({error}); {_ADVICE}") from error


def _metadata(reader: _Reader) -> dict[str, Any]:
    try:
        metadata = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    except (ValueError, IndexError) as error:
        raise ModelError(f"corrupt GGUF metadata ({error}); {_ADVICE}") from error
    if typed(metadata, "split.count", int, 1) > 1:
        raise ModelError("this is one part of a split GGUF; join the parts first (llama-gguf-split --merge)")
    return metadata


def _spec(
    metadata: Mapping[str, Any], family: Family, tensors: Mapping[str, Any], factors: np.ndarray | None
) -> ModelSpec:
    arch = family.gguf_name

    def integer(key: str, default: int | None = None) -> int:
        key = f"{arch}.{key}"
        value = metadata.get(key)
        if isinstance(value, list) and len(set(value)) == 1:
            # one value for each layer, all the same
            return typed({key: value[0]}, key, int)
        return typed(metadata, key, int, default)

    hidden, heads = integer("embedding_length"), integer("attention.head_count")
    if heads < 1 or hidden % heads and f"{arch}.attention.key_length" not in metadata:
        raise ModelError(f"{arch}.embedding_length={hidden} is not a multiple of {arch}.attention.head_count={heads}")
    head_dim = integer("attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if integer(key, head_dim) != head_dim:
            raise ModelError(f"{arch}.{key}={integer(key)} is not supported; kvloom serves only head_dim ({head_dim})")
    return ModelSpec(
        family=family.name,
        n_layers=integer("block_count"),
        hidden_size=hidden,
        n_heads=heads,
        n_kv_heads=integer("attention.head_count_kv", heads),
        head_dim=head_dim,
        intermediate_size=integer("feed_forward_length"),
        vocab_size=_vocab_size(tensors) or integer("vocab_size"),
        context_length=integer("context_length"),
        norm_eps=_decimal(typed(metadata, f"{arch}.attention.layer_norm_rms_epsilon", float)),
        rope_theta=_decimal(typed(metadata, f"{arch}.rope.freq_base", float, 10_000.0)),
        rope_scaling=_rope_scaling(metadata, arch, factors),
        tied_embeddings="output.weight" not in tensors,
    )


def _vocab_size(tensors: Mapping[str, Any]) -> int:
    """Rows of the embedding, or 0 if there is none. Some files have a wrong ``vocab_size`` and older ones have none."""
    embedding = tensors.get("token_embd.weight")
    return 0 if embedding is None else _shape(embedding)[0]


def _rope_scaling(metadata: Mapping[str, Any], arch: str, factors: np.ndarray | None) -> RopeScaling | None:
    key = f"{arch}.rope.scaling.type"
    kind = typed(metadata, key, str, "linear")
    if kind not in ("none", "linear"):
        raise ModelError(f"{key}={kind!r} is not supported; kvloom serves 'none' and 'linear'")
    # "scale_linear" is the older name. Factors 0 and 1 both mean no scaling
    older = typed(metadata, f"{arch}.rope.scale_linear", float, 1.0)
    factor = _decimal(typed(metadata, f"{arch}.rope.scaling.factor", float, older)) if kind == "linear" else 1.0
    if factor in (0, 1):
        return None if factors is None else tuple(factors.tolist())
    if factors is not None:
        raise ModelError(f"linear RoPE scaling together with {_ROPE_FACTORS} is not supported")
    return LinearScaling(factor)


def _decimal(value: float) -> float:
    """Undo GGUF's rounding to fp32, which turns 1e-5 into 9.99999974e-06."""
    return float(str(np.float32(value)))


def _canonical_names(spec: ModelSpec, family: Family) -> dict[str, str]:
    """GGUF tensor names to canonical names, including the head."""
    table = gguf.get_tensor_name_map(family.gguf_arch, spec.n_layers)
    names = {}
    for name in {**tensor_shapes(spec), "lm_head.weight": ()}:
        hf_name = name if name.startswith("lm_head") else f"model.{name}"
        names[table.get_name(hf_name, try_suffixes=(".weight",))] = name
    return names


def _shape(tensor: gguf.ReaderTensor) -> tuple[int, ...]:
    return tuple(reversed(tensor.shape.tolist()))  # GGUF lists the innermost dimension first


def _halves(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo the interleaving of each head's two halves. Rows [heads * head_dim, any] may be quantized."""
    return rows.reshape(heads, -1, 2, rows.shape[-1]).swapaxes(1, 2).reshape(rows.shape)


def _values(tensor: gguf.ReaderTensor, data: np.ndarray | None = None) -> np.ndarray:
    """A copy of a tensor's values, dequantized to fp32. ``data`` replaces the tensor's raw data."""
    try:
        values = gguf.dequantize(tensor.data if data is None else data, tensor.tensor_type)
    except NotImplementedError as error:
        kind = tensor.tensor_type.name
        raise ModelError(f"tensor {tensor.name} has type {kind}, which is not supported; {_OTHER_FILES}") from error
    return np.require(values, np.float32, ["C", "W"])  # for fp32 the library returns a read-only view of the file
