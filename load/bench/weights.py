"""Writes the default model as Hugging Face folders for the peers: the same weights, dequantized once."""

import json
import os
import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from bench.peers import model_path
from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom.models.spec import ModelSpec
from kvloom.text.gguf_tokenizer import build

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def write_folders() -> None:
    """Write the folders ``bf16`` and ``fp32`` unless they exist. A folder appears only when it is complete."""
    missing = [kind for kind in DTYPES if not model_path(kind).is_dir()]
    if not missing:
        return
    file = GgufFile(default_model())
    for kind in missing:
        partial = model_path(f"{kind}.partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        _write(file, partial, DTYPES[kind])
        os.replace(partial, model_path(kind))


def _write(file: GgufFile, folder: Path, dtype: torch.dtype) -> None:
    tensors = {f"model.{name}": tensor for name, tensor in file.tensors(dtype)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer = build(file.metadata).hf
    tokenizer.save_pretrained(folder)
    config = llama_config(file.spec, str(dtype).removeprefix("torch."))
    config |= {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def llama_config(spec: ModelSpec, dtype: str) -> dict[str, object]:
    """The config.json of a Llama model without RoPE scaling, for old and new readers."""
    assert spec.family == "llama" and spec.rope_scaling is None and spec.tied_embeddings
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "vocab_size": spec.vocab_size,
        "hidden_size": spec.hidden_size,
        "intermediate_size": spec.intermediate_size,
        "num_hidden_layers": spec.n_layers,
        "num_attention_heads": spec.n_heads,
        "num_key_value_heads": spec.n_kv_heads,
        "head_dim": spec.head_dim,
        "max_position_embeddings": spec.context_length,
        "rms_norm_eps": spec.norm_eps,
        "rope_theta": spec.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": spec.rope_theta},
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        "torch_dtype": dtype,
    }
