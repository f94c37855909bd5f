"""Tiny random models for tests: Hugging Face folders from transformers, and the same weights as GGUF files."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType as GgmlType
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast, Qwen2Config

from support.some_tokenizers import NAMED, sentencepiece

HEADS = [(4, 4), (4, 2), (9, 3), (8, 1), (14, 2)]
"""(n_heads, n_kv_heads) worth testing: MHA, GQA, the default model's, MQA, a ratio that is no power of two."""

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
"""``rope_parameters`` with an original context that is shorter than a tiny model's."""

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
BOS, EOS = 1, 2
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
_CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog did not mind it in the least.",
    "What is a cache? A cache is a place where the things that will be needed again are kept.",
    "Café crème, naïve façade, Übergröße: accents are letters, too. 12 times 34 is 408.",
] * 4


def make_tiny(
    folder: Path,
    *,
    family: Literal["llama", "qwen2"] = "llama",
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 16,
    layers: int = 2,
    tied: bool = True,
    sharded: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Save a random model and its tokenizer as a Hugging Face folder. Returns the folder.

    The weights are so large that the logits depend on every layer, and no norm weight is one. ``config`` overrides
    keys of the transformers config (``rope_scaling``, ``hidden_size``, ``max_position_embeddings`` ...).
    """
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(folder)
    kind = {"llama": LlamaConfig, "qwen2": Qwen2Config}[family]
    settings: dict[str, Any] = {
        "hidden_size": heads * head_dim,
        "head_dim": head_dim,
        "intermediate_size": 96,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": tokenizer.get_vocab_size(),
        "max_position_embeddings": 256,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
        "bos_token_id": BOS,
        "eos_token_id": EOS,
    }
    model = AutoModelForCausalLM.from_config(kind(**{**settings, **config}), dtype=torch.float32)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith("norm.weight"):
                weight.copy_(1 + 0.3 * noise)
            elif weight.ndim == 1:
                weight.copy_(0.3 * noise)
            else:
                weight.copy_(noise * (1.0 if "embed" in name else 1.5 * weight.shape[1] ** -0.5))
    model.to(dtype).save_pretrained(folder, max_shard_size="50KB" if sharded else "1GB")
    return folder


def make_sentencepiece_tiny(folder: Path, **config: Any) -> Path:
    """Like ``make_tiny``, but with a SentencePiece tokenizer and without a chat template."""
    tokenizer = sentencepiece()
    make_tiny(folder, vocab_size=tokenizer.get_vocab_size(), **config)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **NAMED).save_pretrained(folder)
    return folder


def make_it_say(folder: Path, ids: list[int]) -> Path:
    """Let a model repeat these different tokens for ever: after each of them the next one is the most likely token.

    The model must be in an unsharded folder and have a separate output matrix.
    """

    def follow(tensors: dict[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                tensor.zero_()
        said = tensors["model.embed_tokens.weight"][ids]
        said = said / said.norm(dim=1, keepdim=True) / tensors["model.norm.weight"]
        tensors["lm_head.weight"].zero_()
        tensors["lm_head.weight"][ids[1:] + ids[:1]] = said

    edit_tensors(folder, follow)
    return folder


def edit_config(folder: Path, **changes: object) -> None:
    """Overwrite keys of config.json."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def edit_tensors(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    """Let ``change`` edit the tensors of an unsharded folder, which it gets by name."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def make_tokenizer(folder: Path) -> Tokenizer:
    """Train a byte-level BPE tokenizer like the default model's, and save it with a chat template."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = [AddedToken(text, special=True, normalized=False) for text in SPECIAL]
    trainer = trainers.BpeTrainer(
        vocab_size=352, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_CORPUS, trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=SPECIAL[BOS], eos_token=SPECIAL[EOS], chat_template=CHAT_TEMPLATE
    )
    fast.save_pretrained(folder)
    return tokenizer


def to_gguf(folder: Path, path: Path, dtype: GgmlType = GgmlType.F16) -> Path:
    """Write a folder of ``make_tiny`` as a GGUF file, like llama.cpp's converter. Returns the file.

    Matrices are ``dtype``, or F16 if their rows are not a multiple of its block size. Vectors stay F32.
    """
    config = AutoConfig.from_pretrained(folder)
    arch = {"llama": gguf.MODEL_ARCH.LLAMA, "qwen2": gguf.MODEL_ARCH.QWEN2}[config.model_type]
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[arch])
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    _add_settings(writer, config, head_dim)
    _add_tokenizer(writer, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config.tie_word_embeddings:
            continue
        if config.model_type == "llama" and name.endswith("q_proj.weight"):
            tensor = _interleave(tensor, config.num_attention_heads)
        if config.model_type == "llama" and name.endswith("k_proj.weight"):
            tensor = _interleave(tensor, config.num_key_value_heads)
        _add_tensor(writer, names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy(), dtype)
    if config.rope_parameters["rope_type"] == "llama3":
        _add_tensor(writer, "rope_freqs.weight", _llama3_factors(config.rope_parameters, head_dim), dtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _interleave(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """The converter's ``permute``: rows of a head go from [first half, second half] to pairs of both."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _add_tensor(writer: gguf.GGUFWriter, name: str, values: np.ndarray, dtype: GgmlType) -> None:
    kind = GgmlType.F32 if values.ndim == 1 else dtype
    if values.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = GgmlType.F16
    writer.add_tensor(name, gguf.quantize(np.ascontiguousarray(values), kind), raw_dtype=kind)


def _add_settings(writer: gguf.GGUFWriter, config: Any, head_dim: int) -> None:
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_rope_dimension_count(head_dim)
    if head_dim != config.hidden_size // config.num_attention_heads:
        writer.add_key_length(head_dim)
        writer.add_value_length(head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    if config.rope_parameters["rope_type"] == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])


def _add_tokenizer(writer: gguf.GGUFWriter, folder: Path) -> None:
    data = json.loads((folder / "tokenizer.json").read_text())
    tokens = sorted(data["model"]["vocab"], key=data["model"]["vocab"].__getitem__)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIAL else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(merge) for merge in data["model"]["merges"]])
    writer.add_bos_token_id(BOS)
    writer.add_eos_token_id(EOS)
    writer.add_add_bos_token(False)
    writer.add_add_space_prefix(False)
    writer.add_chat_template(CHAT_TEMPLATE)


def _llama3_factors(rope: dict[str, Any], head_dim: int) -> np.ndarray:
    low, high, context = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    frequencies = 1.0 / (rope["rope_theta"] ** (np.arange(0, head_dim, 2, dtype=np.float32) / head_dim))
    factors = []
    for wavelength in 2 * np.pi / frequencies:
        if wavelength < context / high:
            factors.append(1.0)
        elif wavelength > context / low:
            factors.append(rope["factor"])
        else:
            smooth = (context / wavelength - low) / (high - low)
            factors.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(factors, dtype=np.float32)
