"""Tokenizers for tests: the default model's, and small ones that are trained here, as folders and as GGUF metadata."""

import json
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import gguf
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast
from transformers.tokenization_utils_base import generate_merges

from kvloom.models.fetch import default_model
from kvloom.models.gguf_file import GgufFile
from kvloom.text.stop_strings import TextStream
from kvloom.text.tokenizer import Tokenizer as KvloomTokenizer

TRICKY = [
    "  two spaces  and   three",
    " one leading blank",
    "12 345 6789, 3.14159 and ½ or Ⅷ",
    "žluťoučký kůň, Übergröße, naïve façade",
    "decomposed: e\u0301 a\u030a",
    "emoji 😀 👩‍👩‍👧 🏳️‍🌈!",
    "newlines\n\n\n  then\r\ntabs\t\t\tand \u00a0 spaces ",
    "天气 ひらがな 한국어 عربى हिन्दी",
    "don't WE'LL I'm 'S o'clock",
    "def f(x):\n    return {'a': [1, 2]}  # !!! ???\n",
    "HTTPServer camelCase XMLParser ΑΒΓαβγ",
    "$5^2 <= ~x|y` == +7",
    "\x00 and \u200b",
]

NAMED = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
"""The settings that name the special tokens of ``sentencepiece`` in a tokenizer_config.json."""

_CORPUS = [*TRICKY, "the answer is that there is a cache and the cache is where the things are kept"] * 3
_SPACE = "\N{LOWER ONE EIGHTH BLOCK}"


@cache
def default_metadata() -> dict[str, Any]:
    return GgufFile(default_model()).metadata


@cache
def default_tokenizer() -> KvloomTokenizer:
    return KvloomTokenizer.from_gguf(default_metadata())


@cache
def byte_level_metadata(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary whose tokens cross all word borders, so that pre-tokenizers make a difference."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    trainer = trainers.BpeTrainer(
        vocab_size=700, min_frequency=1, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    trained.train_from_iterator(_CORPUS, trainer)
    model = json.loads(trained.to_str())["model"]
    tokens = [*sorted(model["vocab"], key=model["vocab"].get), "<|begin|>", "<|im_end|>", "<think>"]
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * (len(tokens) - 3) + [3, 3, 4],
        "tokenizer.ggml.merges": [" ".join(merge) for merge in model["merges"]],
        "tokenizer.ggml.bos_token_id": len(tokens) - 3,
        "tokenizer.ggml.eos_token_id": len(tokens) - 2,
    }


@cache
def _sentencepiece_json() -> str:
    """A Llama-style tokenizer.json: SentencePiece BPE with byte fallback, without rare characters in the vocabulary."""
    trained = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    trained.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), normalizers.Replace(" ", _SPACE)])
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    trained.decoder = decoders.Sequence(steps)
    specials = [AddedToken(token, special=True, normalized=False) for token in ("<unk>", "<s>", "</s>")]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=500, limit_alphabet=40, special_tokens=[*specials, *bytes_], show_progress=False
    )
    trained.train_from_iterator(_CORPUS, trainer)
    description = json.loads(trained.to_str())
    # The byte tokens were added only to get their ids; they are ordinary tokens
    description["added_tokens"] = description["added_tokens"][:3]
    # SentencePiece has only tokens and scores, and its converters list every pair that makes a token
    model = description["model"]
    ranked = {token: -float(rank) for rank, token in enumerate(map("".join, model["merges"]))}
    scores = {token: ranked.get(token, -1000.0) for token in sorted(model["vocab"], key=model["vocab"].get)}
    model["merges"] = generate_merges(model["vocab"], scores)
    return json.dumps(description | {"scores": scores})


def sentencepiece(*, adds_bos: bool = True, adds_eos: bool = False) -> Tokenizer:
    description = json.loads(_sentencepiece_json())
    del description["scores"]
    tokenizer = Tokenizer.from_str(json.dumps(description))
    single = ["<s>"] * adds_bos + ["$A"] + ["</s>"] * adds_eos
    tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=[("<s>", 1), ("</s>", 2)])
    return tokenizer


@cache
def sentencepiece_metadata() -> dict[str, Any]:
    scores = json.loads(_sentencepiece_json())["scores"]
    tokens = list(scores)
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": list(scores.values()),
        "tokenizer.ggml.token_type": [2, 3, 3] + [6] * 256 + [1] * (len(tokens) - 259),
    }


@cache
def sentencepiece_tokenizer() -> KvloomTokenizer:
    return KvloomTokenizer.from_gguf(sentencepiece_metadata())


@cache
def sentencepiece_tokenizer_without_prefix() -> KvloomTokenizer:
    return KvloomTokenizer.from_gguf(sentencepiece_metadata() | {"tokenizer.ggml.add_space_prefix": False})


def deltas(
    tokenizer: KvloomTokenizer, ids: Iterable[int], stop: Sequence[str] = (), include_stop: bool = False
) -> tuple[list[str], bool]:
    """The text that each token of an answer adds, then the text at the end; and whether a stop string was found."""
    stream = TextStream(tokenizer, tuple(stop), include_stop)
    found = [stream.push(token_id) for token_id in ids]
    return [*found, stream.flush()], stream.stopped


def whole_decode(backend: Tokenizer, ids: Sequence[int]) -> str:
    """The text that ``tokenizers`` decodes from all ids, but with invalid UTF-8 replaced as Unicode recommends."""
    theirs = backend.decode(list(ids))
    if "\ufffd" not in theirs or backend.token_to_id("<0xC3>") is None:
        return theirs
    special = {token_id for token_id, token in backend.get_added_tokens_decoder().items() if token.special}
    tokens = [backend.id_to_token(token_id) for token_id in ids if token_id not in special]
    spelled = [token.replace(_SPACE, " ") for token in tokens if token is not None]
    data = b"".join(bytes.fromhex(token[3:5]) if token.startswith("<0x") else token.encode() for token in spelled)
    text = data.decode(errors="replace")
    return text.removeprefix(" ") if "Strip" in backend.to_str() else text


def save_folder(folder: Path, tokenizer: Tokenizer, config: dict[str, Any] | None = None, **settings: Any) -> Path:
    """Write a Hugging Face folder. ``settings`` go into tokenizer_config.json, ``config`` into config.json."""
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast"} | settings
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"} | (config or {})))
    return folder


def transformers_from_gguf(folder: Path, metadata: dict[str, Any]) -> PreTrainedTokenizerFast:
    """The tokenizer that transformers builds from the same metadata, through a GGUF file."""
    writer = gguf.GGUFWriter(folder / "tokenizer.gguf", metadata["general.architecture"])
    for key, value in metadata.items():
        if key == "tokenizer.ggml.scores":
            writer.add_key_value(key, value, gguf.GGUFValueType.ARRAY, gguf.GGUFValueType.FLOAT32)
        elif isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif key != "general.architecture":
            writer.add_string(key, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return PreTrainedTokenizerFast.from_pretrained(folder, gguf_file="tokenizer.gguf")
