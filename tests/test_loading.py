"""Model files: what is loaded is what transformers loads, and what can't be served is refused by name."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvloom.errors import ModelError
from kvloom.fetch import default_model
from kvloom.models.spec import ModelSpec, rope_inv_freq, tensor_shapes
from kvloom.models.weights import ModelFiles, open_model
from tiny_models import HEADS, make_tiny, to_gguf

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
ROPES = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 100_000.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    LLAMA3,
    {**LLAMA3, "original_max_position_embeddings": 8192, "factor": 32.0},
]


def reference(folder: Path) -> dict[str, torch.Tensor]:
    """The fp32 weights that transformers loads, under our names, without a tied head."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    weights = {name.removeprefix("model."): tensor for name, tensor in model.state_dict().items()}
    if model.config.tie_word_embeddings:
        del weights["lm_head.weight"]
    return weights


def assert_same(loaded: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert set(loaded) == set(expected)
    for name, tensor in expected.items():
        assert torch.equal(loaded[name], tensor), name


def edit_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_hf_folder_loads_what_transformers_loads(tmp_path, heads, kv_heads, sharded):
    folder = make_tiny(tmp_path, heads=heads, kv_heads=kv_heads, sharded=sharded)
    files = open_model(folder)
    assert (files.kind, files.path) == ("hf", folder)
    assert (files.spec.n_heads, files.spec.n_kv_heads) == (heads, kv_heads)
    loaded = files.load(torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == tensor_shapes(files.spec)
    assert_same(loaded, reference(folder))


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_hf_folder_dtypes(tmp_path, stored):
    folder = make_tiny(tmp_path, dtype=stored)
    expected = reference(folder)
    for wanted in (torch.float32, torch.bfloat16):
        assert_same(open_model(folder).load(wanted), {name: tensor.to(wanted) for name, tensor in expected.items()})


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize(("heads", "kv_heads"), HEADS)
def test_gguf_is_the_same_model_as_the_folder(tmp_path, heads, kv_heads, tied):
    folder = make_tiny(tmp_path, heads=heads, kv_heads=kv_heads, tied=tied)
    expected = reference(folder)
    exact = open_model(to_gguf(folder, tmp_path / "f32.gguf", GgmlType.F32))
    assert exact.kind == "gguf"
    assert exact.spec == open_model(folder).spec
    assert_same(exact.load(torch.float32), expected)
    half = open_model(to_gguf(folder, tmp_path / "f16.gguf"))
    rounded = {name: t.half().float() if t.ndim == 2 else t for name, t in expected.items()}
    assert_same(half.load(torch.float32), rounded)
    assert_same(half.load(torch.bfloat16), {name: tensor.bfloat16() for name, tensor in rounded.items()})


# half a step of the coarsest block: |w| < 4.5 here, over 127 steps a side or 15 steps in all
@pytest.mark.parametrize(("dtype", "tolerance"), [(GgmlType.Q8_0, 4.5 / 127 / 2), (GgmlType.Q4_1, 9 / 15 / 2)])
def test_quantized_gguf(tmp_path, dtype, tolerance):
    folder = make_tiny(tmp_path, heads=9, kv_heads=3, hidden_size=144 + 144)
    files = open_model(to_gguf(folder, tmp_path / "m.gguf", dtype))
    weights = reference(folder)
    for name, tensor in files.tensors(torch.float32):
        assert (tensor - weights[name]).abs().max() <= tolerance * 1.05, name
        assert torch.equal(tensor, weights[name]) == (tensor.ndim == 1), name


def test_head_dim_of_its_own(tmp_path):
    folder = make_tiny(tmp_path, heads=4, kv_heads=2, head_dim=24, hidden_size=64)
    path = to_gguf(folder, tmp_path / "m.gguf", GgmlType.F32)
    assert open_model(path).spec == open_model(folder).spec
    assert open_model(path).spec.head_dim == 24
    assert_same(open_model(path).load(torch.float32), reference(folder))


def test_weights_own_their_memory(tmp_path):
    folder = make_tiny(tmp_path)
    path = to_gguf(folder, tmp_path / "m.gguf", GgmlType.F32)
    for file in (folder, path):
        first, second = open_model(file).load(torch.float32), open_model(file).load(torch.float32)
        for tensor in first.values():
            tensor.zero_()
        assert all(tensor.any() for tensor in second.values())
        assert_same(open_model(file).load(torch.float32), second)


def test_metadata_is_what_the_library_reads(tmp_path):
    path = to_gguf(make_tiny(tmp_path), tmp_path / "m.gguf")
    fields = gguf.GGUFReader(path).fields
    expected = {name: field.contents() for name, field in fields.items() if not name.startswith("GGUF.")}
    metadata = open_model(path).metadata
    assert metadata == expected
    assert metadata["tokenizer.ggml.tokens"][:2] == ["<|endoftext|>", "<|im_start|>"]
    assert metadata["tokenizer.ggml.token_type"][2:4] == [3, 1]


@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("head_dim", [16, 64, 80, 128])
def test_rope_frequencies_are_transformers_own(tmp_path, rope, head_dim):
    folder = make_tiny(tmp_path, head_dim=head_dim, layers=1, rope_parameters=rope)
    expected = LlamaRotaryEmbedding(AutoConfig.from_pretrained(folder)).inv_freq
    found = rope_inv_freq(open_model(folder).spec)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    theta = rope["rope_theta"]
    edit_config(folder, rope_parameters=None, rope_theta=theta, rope_scaling={**rope, "type": rope["rope_type"]})
    assert torch.equal(rope_inv_freq(open_model(folder).spec), expected)
    in_gguf = rope_inv_freq(open_model(to_gguf(folder, tmp_path / "m.gguf")).spec)
    torch.testing.assert_close(in_gguf, expected, rtol=1e-6 if rope["rope_type"] == "llama3" else 0, atol=0)


def _redundant_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()


def _other_head(tensors: dict[str, torch.Tensor]) -> None:
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1


def test_tied_with_a_redundant_head(tmp_path):
    folder = make_tiny(tmp_path)
    expected = reference(folder)
    for head in (_redundant_head, _other_head):
        edit_tensors(folder, head)
        assert_same(open_model(folder).load(torch.float32), expected)
        assert_same(reference(folder), expected)


def test_tied_with_a_redundant_head_sharded(tmp_path):
    folder = make_tiny(tmp_path, tied=False, sharded=True)
    edit_config(folder, tie_word_embeddings=True)
    files = open_model(folder)
    assert files.spec.tied_embeddings
    assert_same(files.load(torch.float32), reference(folder))


@pytest.mark.parametrize("sharded", [False, True])
def test_untied_head(tmp_path, sharded):
    folder = make_tiny(tmp_path, tied=False, sharded=sharded)
    loaded = open_model(folder).load(torch.float32)
    assert_same(loaded, reference(folder))
    assert not torch.equal(loaded["lm_head.weight"], loaded["embed_tokens.weight"])


@pytest.mark.parametrize("sharded", [False, True])
def test_untied_without_head_is_refused(tmp_path, sharded):
    folder = make_tiny(tmp_path, tied=True, sharded=sharded)
    edit_config(folder, tie_word_embeddings=False)
    with pytest.raises(ModelError, match=r"lm_head\.weight is missing"):
        open_model(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(tmp_path):
    folder = make_tiny(tmp_path)
    expected = reference(folder)
    edit_tensors(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert_same(open_model(folder).load(torch.float32), expected)


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
    ({"rope_parameters": {**LLAMA3, "high_freq_factor": 1.0}}, "high_freq_factor"),
    ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    ({"hidden_size": None}, "hidden_size is missing"),
    ({"hidden_size": "64"}, "hidden_size=64 must be int"),
    ({"hidden_size": True}, "hidden_size=True must be int"),
    ({"hidden_size": 66}, "hidden_size=66 is not a multiple of num_attention_heads=4"),
    ({"num_attention_heads": 0}, "num_attention_heads=0"),
    ({"num_key_value_heads": 3}, "n_heads=4 is not a multiple of n_kv_heads=3"),
    ({"num_hidden_layers": -1}, "n_layers=-1 must be positive"),
    ({"head_dim": 15}, "head_dim=15 is odd"),
    ({"rms_norm_eps": 0.0}, "norm_eps=0.0 must be positive"),
    ({"num_hidden_layers": 3}, r"layers\.2\.input_layernorm\.weight \(and 8 more\) is missing"),
    ({"num_hidden_layers": 1}, r"layers\.1\..* \(and 8 more\) has no place in a llama model"),
    ({"intermediate_size": 95}, r"mlp\.gate_proj\.weight has shape \[96, 64\], the model's settings say \[95, 64\]"),
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
    (lambda t: t.update({"model.layers.0.self_attn.q_proj.bias": torch.ones(64)}), r"q_proj\.bias has no place"),
    (lambda t: t.update({"norm.weight": torch.ones(64)}), r"norm\.weight is there twice"),
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
    refused(folder, "neither model.safetensors nor model.safetensors.index.json is there")
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
    moved = {**whole["weight_map"], "model.norm.weight": whole["weight_map"]["model.embed_tokens.weight"]}
    for weight_map, match in (
        ({**whole["weight_map"], "model.more.weight": "model-00009-of-00009.safetensors"}, "00009.*missing"),
        (moved, "disagree about tensor model.norm.weight"),
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
    refused(cut, "truncated or corrupt GGUF file.*download or convert it again")


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
    refused(to_gguf(folder, tmp_path / "m.gguf"), r"blk\.0\.attn_q\.bias has no place in a llama model")


@pytest.fixture(scope="module")
def default() -> ModelFiles:
    return open_model(default_model())


def test_default_model_spec(default):
    assert default.spec == ModelSpec(
        family="llama",
        n_layers=30,
        hidden_size=576,
        n_heads=9,
        n_kv_heads=3,
        head_dim=64,
        intermediate_size=1536,
        vocab_size=49152,
        context_length=8192,
        norm_eps=1e-5,
        rope_theta=100_000.0,
        rope_scaling=None,
        tied_embeddings=True,
    )
    assert len(default.metadata["tokenizer.ggml.tokens"]) == 49152


def test_default_model_weights(default):
    loaded = default.load(torch.float32)
    assert {name: tuple(tensor.shape) for name, tensor in loaded.items()} == tensor_shapes(default.spec)
    assert all(tensor.isfinite().all() for tensor in loaded.values())
    raw = {tensor.name: tensor for tensor in gguf.GGUFReader(default.path).tensors}
    undo = LlamaTensorProcessor({"num_attention_heads": 9, "num_key_value_heads": 3}).process
    for theirs, ours in {
        "token_embd": "embed_tokens",
        "output_norm": "norm",
        "blk.29.attn_q": "layers.29.self_attn.q_proj",
        "blk.7.attn_k": "layers.7.self_attn.k_proj",
        "blk.7.attn_v": "layers.7.self_attn.v_proj",
        "blk.0.ffn_down": "layers.0.mlp.down_proj",
        "blk.0.ffn_norm": "layers.0.post_attention_layernorm",
    }.items():
        tensor = raw[f"{theirs}.weight"]
        expected = undo(gguf.dequantize(tensor.data, tensor.tensor_type), name=tensor.name).weights
        assert torch.equal(loaded[f"{ours}.weight"], torch.tensor(expected)), theirs


def test_spec_refuses_factors_of_another_head_dim(default):
    with pytest.raises(ModelError, match="3 RoPE frequency factors for head_dim=64"):
        replace(default.spec, rope_scaling=(1.0, 2.0, 3.0))
