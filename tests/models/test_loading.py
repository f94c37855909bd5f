"""Model files: what is loaded is what transformers loads."""

from dataclasses import replace
from pathlib import Path

import gguf
import pytest
import torch
from gguf import GGMLQuantizationType as GgmlType
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_gguf_pytorch_utils import LlamaTensorProcessor
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from kvloom.errors import ModelError
from kvloom.models.fetch import default_model
from kvloom.models.spec import ModelSpec, rope_inv_freq, tensor_shapes
from kvloom.models.weights import ModelFiles, open_model
from support.tiny_models import HEADS, LLAMA3_ROPE, edit_config, edit_tensors, make_tiny, to_gguf

ROPES = [
    {"rope_type": "default", "rope_theta": 10_000.0},
    {"rope_type": "default", "rope_theta": 100_000.0},
    {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 3.0},
    LLAMA3_ROPE,
    {**LLAMA3_ROPE, "original_max_position_embeddings": 8192, "factor": 32.0},
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
    expected = {name: tensor.clone() for name, tensor in reference(folder).items()}  # transformers' own are mapped
    for model, file in ((folder, folder / "model.safetensors"), (path, path)):
        loaded = open_model(model).load(torch.float32)
        with file.open("r+b") as overwritten:  # in place, as copying another model over a served one does
            overwritten.write(bytes(file.stat().st_size))
        assert_same(loaded, expected)
        for tensor in loaded.values():
            tensor.zero_()


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
    assert all(tensor.sum().isfinite() for tensor in loaded.values())
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
