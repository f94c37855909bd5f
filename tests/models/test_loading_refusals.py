"""Model files that can't be served are refused by name, with the path and what to do."""

import json
import shutil
from pathlib import Path

import gguf
import pytest
import torch

from kvloom.errors import ModelError
from kvloom.models.weights import open_model
from support.tiny_models import LLAMA3_ROPE, edit_config, edit_tensors, make_tiny, to_gguf

CONFIG_REFUSALS = [
    ({"model_type": "mixtral"}, r"architecture 'mixtral' is not supported; kvloom serves: llama"),
    ({"model_type": None}, r"architecture None is not supported"),
    ({"architectures": ["LlamaForSequenceClassification"]}, r"LlamaForSequenceClassification.*serves: llama"),
    ({"attention_bias": True}, "attention_bias=True"),
    ({"mlp_bias": True}, "mlp_bias=True"),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not supported; kvloom serves 'silu'"),
    ({"quantization_config": {"quant_method": "awq"}}, "quantization_config=.*awq"),
    ({"rope_parameters": {"rope_type": "yarn", "factor": 4.0}}, "rope_type 'yarn'"),
    ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "RoPE parameters"),
    ({"rope_parameters": {"rope_type": "linear"}}, "factor is missing"),
    ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor=0.0.*positive"),
    ({"rope_parameters": {**LLAMA3_ROPE, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size=64 must be int"),
    ({"hidden_size": True}, "hidden_size=True must be int"),
    ({"hidden_size": 66, "head_dim": None}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
    ({"num_hidden_layers": -1}, "n_layers=-1 must be positive"),
    ({"head_dim": 15}, "head_dim=15 is odd"),
    ({"rms_norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
    ({"num_hidden_layers": 3}, r"layers\.2\.input_layernorm\.weight \(and 8 more\) is missing"),
    ({"num_hidden_layers": 1}, r"layers\.1\..* \(and 8 more\) does not belong to a llama model"),
    ({"intermediate_size": 95}, r"mlp\.gate_proj\.weight has shape \[96, 64\], but the model's config says \[95, 64\]"),
]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def folder(tiny, tmp_path) -> Path:
    return Path(shutil.copytree(tiny, tmp_path / "model"))


def refused(path: Path, match: str) -> None:
    """Opening and loading is refused with the path and ``match`` in the message."""
    with pytest.raises(ModelError, match=match) as caught:
        open_model(path).load(torch.float32)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("changes", "match"), CONFIG_REFUSALS)
def test_config_refused_by_name(folder, changes, match):
    edit_config(folder, **changes)
    refused(folder, match)


TENSOR_REFUSALS = [
    (lambda t: t.pop("model.norm.weight"), r"tensor norm\.weight is missing"),
    (lambda t: t.pop("model.layers.1.self_attn.v_proj.weight"), r"layers\.1\.self_attn\.v_proj\.weight is missing"),
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), r"q_proj\.bias does not belong to"),
    (lambda t: t.update({"norm.weight": torch.ones(64)}), r"norm\.weight appears twice"),
    (lambda t: t.update({"model.norm.weight": torch.ones(63)}), r"norm\.weight has shape \[63\]"),
    (lambda t: t.update({"model.norm.weight": torch.ones(64, dtype=torch.int8)}), r"norm\.weight: dtype I8"),
]


@pytest.mark.parametrize(("change", "match"), TENSOR_REFUSALS)
def test_tensors_refused_by_name(folder, change, match):
    edit_tensors(folder, change)
    refused(folder, match)


def test_qwen2_is_refused_by_name(tmp_path):
    folder = make_tiny(tmp_path / "qwen2", family="qwen2")
    refused(folder, "architecture 'qwen2' is not supported; kvloom serves: llama")
    refused(to_gguf(folder, tmp_path / "m.gguf"), "architecture 'qwen2' is not supported; kvloom serves: llama")


def test_paths_that_hold_no_model(folder, tmp_path):
    refused(tmp_path / "nowhere", "does not exist; --model takes")
    refused(folder / "config.json", "not a GGUF file; --model takes")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(folder, "has neither model.safetensors nor model.safetensors.index.json")
    (folder / "config.json").unlink()
    refused(folder, "config.json is missing")


def test_broken_json(folder):
    for text in ("{", "[]", '"\udcff'):
        (folder / "config.json").write_bytes(text.encode(errors="surrogateescape"))
        refused(folder, "config.json is not")


@pytest.mark.parametrize("keep", [0, 4, 200, -1])
def test_truncated_safetensors(folder, keep):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    refused(folder, "model.safetensors is missing, truncated or corrupt.*download")


def test_broken_shards(tmp_path):
    folder = make_tiny(tmp_path, sharded=True)
    index = folder / "model.safetensors.index.json"
    whole = json.loads(index.read_text())
    for weight_map, match in (
        ({**whole["weight_map"], "model.more.weight": "model-00009-of-00009.safetensors"}, "00009.*missing"),
        (None, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        refused(folder, match)


def test_truncated_gguf(folder, tmp_path):
    path = to_gguf(folder, tmp_path / "m.gguf")
    whole = path.read_bytes()
    tensors_at = gguf.GGUFReader(path).data_offset
    cut = tmp_path / "cut.gguf"
    # in the header, a scalar, the vocabulary, the tensor list, the first tensor, the last one
    ends = [3, 10, 30, 300, 2000, 6000, tensors_at - 200, tensors_at, tensors_at + 1000, len(whole) - 1000]
    for end in ends:
        assert end < len(whole)
        cut.write_bytes(whole[:end])
        refused(cut, "GGUF")
    refused(cut, "the GGUF file is truncated or corrupt.*download or convert it again")


def test_corrupt_gguf(folder, tmp_path):
    whole = to_gguf(folder, tmp_path / "m.gguf").read_bytes()
    broken = tmp_path / "broken.gguf"
    vocabulary = whole.index(b"tokenizer.ggml.tokens") + len(b"tokenizer.ggml.tokens")
    for start, patch, match in (
        (4, b"\x09", "GGUF version 9"),
        (8, b"\xff" * 7, "truncated or corrupt"),
        (vocabulary + 4, b"\x63", "truncated or corrupt"),
        (vocabulary + 8, b"\xff" * 7, "truncated or corrupt"),
        (vocabulary + 16 + 8, b"\xff", "corrupt GGUF metadata"),
    ):
        broken.write_bytes(whole[:start] + patch + whole[start + len(patch) :])
        refused(broken, match)


GGUF_REFUSALS = [
    (lambda w: w.add_expert_count(8), r"llama\.expert_count=8 is not supported"),
    (lambda w: w.add_sliding_window(64), r"llama\.attention\.sliding_window=64"),
    (lambda w: w.add_rope_scaling_type(gguf.RopeScalingType.YARN), r"llama\.rope\.scaling\.type='yarn'"),
    (lambda w: w.add_value_length(8), r"llama\.attention\.value_length=8"),
    (lambda w: w.add_uint32("split.count", 2), "join the parts"),
]


@pytest.mark.parametrize(("change", "match"), GGUF_REFUSALS)
def test_gguf_options_refused_by_name(folder, tmp_path, monkeypatch, change, match):
    begin = gguf.GGUFWriter.write_header_to_file
    monkeypatch.setattr(gguf.GGUFWriter, "write_header_to_file", lambda w: (change(w), begin(w)))
    refused(to_gguf(folder, tmp_path / "m.gguf"), match)


@pytest.mark.parametrize(
    ("old", "new", "match"),
    [
        (b"blk.0.ffn_up.weight", b"blk.7.ffn_up.weight", r"layers\.0\.mlp\.up_proj\.weight is missing"),
        (b"output_norm.weight", b"output_morn.weight", r"tensor norm\.weight is missing"),
        (b"llama.block_count", b"llama.block_mount", r"llama\.block_count is missing"),
    ],
)
def test_gguf_names_that_are_not_there(folder, tmp_path, old, new, match):
    path = to_gguf(folder, tmp_path / "m.gguf")
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new))
    refused(path, match)


def test_gguf_left_over_tensor(folder, tmp_path, monkeypatch):
    begin = gguf.GGUFWriter.write_header_to_file
    bias = torch.ones(64).numpy()
    monkeypatch.setattr(
        gguf.GGUFWriter, "write_header_to_file", lambda w: (w.add_tensor("blk.0.attn_q.bias", bias), begin(w))
    )
    refused(to_gguf(folder, tmp_path / "m.gguf"), r"blk\.0\.attn_q\.bias does not belong to a llama model")
