"""How byte-level tokenizers split text into words before they merge, by GGUF's ``tokenizer.ggml.pre``.

The names and meanings are llama.cpp's (``llama_vocab::impl::load`` and ``llm_tokenizer_bpe`` in src/llama-vocab.cpp).
Each regex comes from the tokenizer.json of a model that uses the name, so that token ids equal transformers'.
"""

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from tokenizers import Regex, pre_tokenizers

from kvloom.errors import ModelError

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Split:
    """How a byte-level tokenizer splits text into words before it merges.

    Attributes:
        steps: pre-tokenizers, applied in this order before the byte-level one.
        gpt2: split with GPT-2's regex last.
        nfc: normalize the text to NFC first.
        whole_words: a word that is in the vocabulary becomes one token even if no merges produce it.
        add_bos: prompts begin with BOS unless the file says otherwise.
    """

    steps: tuple[Any, ...] = ()
    gpt2: bool = False
    nfc: bool = False
    whole_words: bool = False
    add_bos: bool = False


def _regex(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), behavior="isolated")


_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3 = _regex(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}" + _TAIL)
_QWEN2 = _regex(_CONTRACTIONS + r"|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}" + _TAIL)
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_TEKKEN = _regex(
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS = pre_tokenizers.Digits(individual_digits=True)

_GPT2_SPLIT = Split(gpt2=True)
_DIGITS_SPLIT = Split(steps=(_DIGITS,), gpt2=True)
_LLAMA3_SPLIT = Split(steps=(_LLAMA3,), whole_words=True, add_bos=True)
_QWEN2_SPLIT = Split(steps=(_QWEN2,), nfc=True)

_LIKE_LLAMA3 = Split(steps=(_LLAMA3,))
_DEFAULT = Split(
    # llama.cpp's fallback for files that name no model's pre-tokenizer
    steps=(
        _regex(r"[\p{P}\$\+<=>\^~\|]+"),
        _regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _regex(r"\p{N}+"),
        _regex(r"[0-9][0-9][0-9]"),
    )
)
_FALCON = Split(
    steps=(
        _regex(r"[\p{P}\$\+<=>\^~\|`]+"),
        _regex(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)"),
        _regex(r"[0-9][0-9][0-9]"),
    )
)
_DEEPSEEK_CODER = Split(
    steps=(
        _regex(r"[\r\n]"),
        _regex(r"\s?\p{L}+"),
        _regex(r"\s?\p{P}+"),
        _regex("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        _DIGITS,
    )
)
_DEEPSEEK_V3 = Split(
    steps=(
        _regex(r"\p{N}{1,3}"),
        _regex("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        _regex(
            r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
            r"""| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"""
        ),
    )
)


def _table(rows: Iterable[tuple[Split, str]]) -> dict[str, Split]:
    return {name: split for split, names in rows for name in names.split()}


PRE_TOKENIZERS = _table(
    (
        (_DEFAULT, "default"),
        (
            _GPT2_SPLIT,
            "gpt-2 phi-2 mpt olmo jais trillion granite-docling exaone4 gigachat a.x-4.0 mellum modern-bert "
            "jina-es jina-de jina-v2-es jina-v2-de",
        ),
        (_DIGITS_SPLIT, "smollm starcoder refact command-r codeshell exaone minerva-7b"),
        (_LLAMA3_SPLIT, "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano"),
        (_LIKE_LLAMA3, "smaug-bpe dbrx glm4 chatglm-bpe"),
        (_QWEN2_SPLIT, "qwen2 deepseek-r1-qwen kormo f2llmv2 megrez"),
        (Split(steps=(_QWEN2,)), "stablelm2 hunyuan solar-open grok-2"),
        (Split(steps=(_TEKKEN,), whole_words=True, add_bos=True), "tekken"),
        (_FALCON, "falcon"),
        (_DEEPSEEK_CODER, "deepseek-coder"),
        (_DEEPSEEK_V3, "deepseek-v3 hunyuan-dense joyai-llm"),
    )
)
"""The splits by name."""


def split_of(name: str | None) -> Split:
    """The split that a file names. Without a name it is llama.cpp's default, with a warning.

    Raises:
        ModelError: it is not supported. The message says what is.
    """
    if not name:
        log.warning(
            "the GGUF file has no tokenizer.ggml.pre: its text is split as llama.cpp does by default, which may not be "
            "how the model was trained; convert the model again"
        )
        return _DEFAULT
    if name not in PRE_TOKENIZERS:
        raise ModelError(
            f"GGUF tokenizer.ggml.pre={name!r} is not supported; use the model's Hugging Face folder, or a file with "
            f"one of {', '.join(sorted(PRE_TOKENIZERS))}"
        )
    return PRE_TOKENIZERS[name]
