"""Builds the tokenizer of a GGUF file, which has a vocabulary and merges but no tokenizer.json."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers
from tokenizers import Tokenizer as Backend
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from kvloom.errors import ModelError
from kvloom.text.gguf_splits import split_of

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4  # tokenizer.ggml.token_type

# Control tokens that end an answer in every model that has them. A GGUF file names one EOS token, but chat models often
# have a second one that the metadata omits. llama.cpp finds it by name, too.
_END_NAMES = frozenset(
    ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>", "<end_of_turn>", "</s>")
)


@dataclass(frozen=True, kw_only=True)
class Parts:
    """The arguments of :class:`kvloom.text.tokenizer.Tokenizer`."""

    hf: PreTrainedTokenizerFast
    prefix: list[int]
    eos_ids: set[int]


def build(metadata: Mapping[str, Any]) -> Parts:
    """Build a tokenizer from the key-value store of a GGUF file.

    Raises:
        ModelError: a key is missing or malformed, or names a tokenizer or pre-tokenizer that is not supported.
    """
    model = _required(metadata, "model")
    tokens: list[str] = list(_required(metadata, "tokens"))
    vocabulary = {token: token_id for token_id, token in enumerate(tokens)}
    if not tokens or len(vocabulary) != len(tokens):
        raise ModelError(
            "GGUF tokenizer.ggml.tokens is empty or has a token twice; the file is broken: convert the model again"
        )
    types: list[int] = list(metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens))
    if len(types) != len(tokens):
        raise ModelError(f"GGUF tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    if model == "gpt2":
        backend, add_bos = _byte_level(metadata, vocabulary)
        defaults: dict[str, int] = {}
    elif model == "llama":
        special = {token for token, kind in zip(tokens, types, strict=True) if kind in (_UNKNOWN, _CONTROL)}
        backend, add_bos = _sentencepiece(metadata, vocabulary, special), True
        defaults = {"bos": 1, "eos": 2, "unknown": 0}
    else:
        raise ModelError(f"GGUF tokenizer.ggml.model={model!r} is not supported; supported: gpt2, llama")

    backend.add_tokens(
        [
            AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind in (_UNKNOWN, _CONTROL, _USER_DEFINED) and token
        ]
    )
    ids = {
        name: _token_id(metadata, name, defaults.get(name), len(tokens))
        for name in ("bos", "eos", "eot", "eom", "unknown", "padding")
    }
    add_bos = bool(metadata.get("tokenizer.ggml.add_bos_token", add_bos))
    if add_bos and ids["bos"] is None:
        raise ModelError("GGUF tokenizer.ggml.add_bos_token is true, but there is no tokenizer.ggml.bos_token_id")
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    hf = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        **{key: tokens[token_id] for key, name in names.items() if (token_id := ids[name]) is not None},
    )
    ends = {token_id for token_id, kind in enumerate(types) if kind == _CONTROL and tokens[token_id] in _END_NAMES}
    ends.update(token_id for name in ("eos", "eot", "eom") if (token_id := ids[name]) is not None)
    return Parts(hf=hf, prefix=[ids["bos"]] if add_bos and ids["bos"] is not None else [], eos_ids=ends)


def _required(metadata: Mapping[str, Any], name: str) -> Any:
    key = f"tokenizer.ggml.{name}"
    if key not in metadata:
        raise ModelError(f"GGUF file has no {key}, so its text can't be tokenized; convert the model again")
    return metadata[key]


def _token_id(metadata: Mapping[str, Any], name: str, default: int | None, count: int) -> int | None:
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key, default)
    if token_id is not None and not (isinstance(token_id, int) and 0 <= token_id < count):
        raise ModelError(f"GGUF {key}={token_id!r} is not one of the {count} tokens")
    return token_id


def _byte_level(metadata: Mapping[str, Any], vocabulary: Mapping[str, int]) -> tuple[Backend, bool]:
    """A byte-level BPE tokenizer like GPT-2's, and whether it adds BOS by default."""
    split = split_of(metadata.get("tokenizer.ggml.pre"))
    merges = _listed_merges(_required(metadata, "merges"), vocabulary)
    backend = Backend(BPE(vocab=dict(vocabulary), merges=merges, ignore_merges=split.whole_words))
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [*split.steps, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.gpt2)]
    )
    backend.decoder = decoders.ByteLevel()
    return backend, split.add_bos


def _sentencepiece(metadata: Mapping[str, Any], vocabulary: Mapping[str, int], special: Collection[str]) -> Backend:
    """SentencePiece BPE with byte fallback, as in Llama's own tokenizer.json and in llama.cpp.

    No merge makes a ``special`` token: text that spells it is text.

    Every piece of text, at the beginning or after a special token, begins with a blank of its own. (transformers 5
    rebuilds the tokenizer so that only the beginning does, and only where there is none yet.)
    """
    architecture = str(metadata.get("general.architecture", ""))
    if architecture.startswith("gemma"):
        raise ModelError(
            f"the tokenizer of {architecture} GGUF files is not supported (their scores are not the merge order); "
            "use the Hugging Face folder"
        )
    if "tokenizer.ggml.merges" in metadata:
        merges = _listed_merges(metadata["tokenizer.ggml.merges"], vocabulary)
    else:
        merges = _merges_by_score(vocabulary, _required(metadata, "scores"))
    merges = [(left, right) for left, right in merges if left + right not in special]
    backend = Backend(BPE(vocab=dict(vocabulary), merges=merges, fuse_unk=True, byte_fallback=True))
    space = "\N{LOWER ONE EIGHTH BLOCK}"
    add_prefix = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    blanks = normalizers.Replace(" ", space)
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(space), blanks]) if add_prefix else blanks
    steps = [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(content=" ", left=1)] if add_prefix else steps)
    return backend


def _listed_merges(merges: list[str], vocabulary: Mapping[str, int]) -> list[tuple[str, str]]:
    pairs = []
    for merge in merges:
        left, _, right = merge.partition(" ")
        if left not in vocabulary or right not in vocabulary or left + right not in vocabulary:
            raise ModelError(f"GGUF tokenizer.ggml.merges: {merge!r} does not join two tokens into a third")
        pairs.append((left, right))
    return pairs


def _merges_by_score(vocabulary: Mapping[str, int], scores: list[float]) -> list[tuple[str, str]]:
    """Merges of a SentencePiece vocabulary, which stores scores only. The merge with the best-scored result is first.

    Every split of a token into two other tokens is a merge. Merges of equal score are in the order of transformers'
    ``generate_merges``: the longer left part first, then the longer right part.
    """
    if len(scores) != len(vocabulary):
        raise ModelError(f"GGUF tokenizer.ggml.scores has {len(scores)} entries for {len(vocabulary)} tokens")
    merges: list[tuple[float, str, str]] = []
    for token, token_id in vocabulary.items():
        splits = [(token[:cut], token[cut:]) for cut in range(1, len(token))]
        pairs = [(left, right) for left, right in splits if left in vocabulary and right in vocabulary]
        pairs.sort(key=lambda pair: (vocabulary[pair[0]], vocabulary[pair[1]]))
        merges.extend((scores[token_id], left, right) for left, right in pairs)
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]
