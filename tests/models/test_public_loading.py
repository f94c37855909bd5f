"""Model files of real users, of kinds that were refused though others load them (K13, K16), or misnamed."""

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from kvloom.errors import ModelError
from kvloom.models.weights import open_model
from support.tiny_models import edit_config, edit_tensors, make_tiny, to_gguf


def weights(path: Path) -> dict[str, torch.Tensor]:
    return open_model(path).load(torch.float32)


def same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return loaded.keys() == expected.keys() and all(torch.equal(loaded[name], expected[name]) for name in expected)


@pytest.fixture(scope="module")
def sharded(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("sharded"), sharded=True)


# K13


def some_file(index: dict[str, str]) -> str:
    return sorted(index.values())[-1]


@pytest.mark.parametrize(
    "change",
    [
        lambda index: index.update({"lm_head.weight": some_file(index)}),
        lambda index: index.update({"model.layers.0.self_attn.rotary_emb.inv_freq": some_file(index)}),
        lambda index: index.pop("model.norm.weight"),
        lambda index: index.update({"model.norm.weight": index["model.embed_tokens.weight"]}),
    ],
    ids=["head of a tied model", "rotary buffer", "left out", "in another file"],
)
def test_k13_what_the_files_contain_counts_and_not_the_index(sharded, tmp_path, change):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    file = folder / "model.safetensors.index.json"
    index: dict[str, Any] = json.loads(file.read_text())
    before = dict(index["weight_map"])
    change(index["weight_map"])
    assert index["weight_map"] != before
    file.write_text(json.dumps(index))
    assert same(weights(folder), weights(sharded))


def test_k13_a_tensor_that_the_model_needs_and_only_the_index_has_is_missing(sharded, tmp_path):
    folder = Path(shutil.copytree(sharded, tmp_path / "model"))
    index = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    file = folder / index["model.norm.weight"]
    one = tmp_path / "one"
    one.mkdir()
    shutil.copy(file, one / "model.safetensors")
    edit_tensors(one, lambda tensors: tensors.pop("model.norm.weight"))
    shutil.copy(one / "model.safetensors", file)
    with pytest.raises(ModelError, match=r"tensor norm\.weight is missing; the model is incomplete"):
        open_model(folder)


@pytest.mark.parametrize(
    "changes",
    [
        {"architectures": ["LLaMAForCausalLM"]},
        {"architectures": ["LlamaForCausalLm"]},
        {"architectures": None},
        {"hidden_act": "swish"},
    ],
)
def test_k13_older_names_in_the_config(tmp_path, changes):
    folder = make_tiny(tmp_path / "model")
    before = open_model(folder)
    edit_config(folder, **changes)
    assert open_model(folder).spec == before.spec
    assert same(weights(folder), before.load(torch.float32))


@pytest.mark.parametrize("buffer", ["inv_freq", "cos_cached", "sin_cached"])
def test_k13_buffers_that_older_versions_saved(tmp_path, buffer):
    folder = make_tiny(tmp_path)
    expected = weights(folder)
    edit_tensors(folder, lambda t: t.update({f"model.layers.0.self_attn.rotary_emb.{buffer}": torch.ones(8)}))
    assert same(weights(folder), expected)


def gguf_with(folder: Path, path: Path, monkeypatch, change: Callable[[gguf.GGUFWriter], None]) -> Path:
    begin = gguf.GGUFWriter.write_header_to_file
    with monkeypatch.context() as patches:
        patches.setattr(gguf.GGUFWriter, "write_header_to_file", lambda w: (change(w), begin(w)))
        return to_gguf(folder, path)


def overwrite(writer: gguf.GGUFWriter, key: str, value: Any, kind: gguf.GGUFValueType) -> None:
    writer.kv_data[0][key] = gguf.gguf_writer.GGUFValue(value, kind)


def test_k13_a_wrong_vocab_size_beside_consistent_tensors(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path / "model")
    right = open_model(to_gguf(folder, tmp_path / "right.gguf"))
    for offset in (-2, 2):
        wrong = right.spec.vocab_size + offset

        def change(writer: gguf.GGUFWriter, wrong: int = wrong) -> None:
            overwrite(writer, "llama.vocab_size", wrong, gguf.GGUFValueType.UINT32)

        files = open_model(gguf_with(folder, tmp_path / "wrong.gguf", monkeypatch, change))
        assert files.metadata["llama.vocab_size"] == wrong
        assert files.spec == right.spec
        assert same(files.load(torch.float32), right.load(torch.float32))


def test_k13_a_value_for_each_layer(tmp_path, monkeypatch):
    folder = make_tiny(tmp_path / "model", layers=2)
    right = open_model(to_gguf(folder, tmp_path / "right.gguf")).spec

    def change(writer: gguf.GGUFWriter, second: int = right.n_kv_heads) -> None:
        del writer.kv_data[0]["llama.attention.head_count_kv"]
        writer.add_array("llama.attention.head_count_kv", [right.n_kv_heads, second])

    assert open_model(gguf_with(folder, tmp_path / "array.gguf", monkeypatch, change)).spec == right
    with pytest.raises(ModelError, match=r"llama\.attention\.head_count_kv=\[2, 1\] must be int"):
        open_model(gguf_with(folder, tmp_path / "mixed.gguf", monkeypatch, lambda writer: change(writer, 1)))


# K16


@pytest.mark.parametrize("kind", [36, 31, 99])
def test_k16_a_tensor_type_that_is_not_supported_is_named(tmp_path, kind):
    path = to_gguf(make_tiny(tmp_path / "model"), tmp_path / "m.gguf")
    data = path.read_bytes()
    name = b"blk.0.ffn_up.weight"
    # after the name: the number of dimensions, the dimensions, the type
    at = data.index(name) + len(name)
    (dimensions,) = struct.unpack_from("<I", data, at)
    at += 4 + 8 * dimensions
    path.write_bytes(data[:at] + struct.pack("<I", kind) + data[at + 4 :])
    with pytest.raises(ModelError) as caught:
        open_model(path)
    message = str(caught.value)
    assert f"m.gguf: tensor blk.0.ffn_up.weight has GGUF type {kind}, which is not supported; use a file of" in message
    assert "corrupt" not in message
