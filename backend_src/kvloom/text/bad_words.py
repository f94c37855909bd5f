"""Turns ``bad_words`` into forbidden tokens. Computed once per request, looked up in every step."""

from collections.abc import Iterable

from kvloom.request import Banned
from kvloom.text.tokenizer import Tokenizer


def banned_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> Banned:
    """The last token of each word's tokenization, keyed by the tokens before it.

    As in vLLM, a word is tokenized with and without a leading space. Other tokenizations of it are not forbidden.

    Raises:
        InvalidArgument: a word contains half of a surrogate pair.
    """
    forms = set()
    for word in words:
        bare = word.lstrip(" ")
        forms |= {tuple(tokenizer.encode_piece(text, "bad_words")) for text in (bare, " " + bare)}
    banned: dict[int, dict[tuple[int, ...], tuple[int, ...]]] = {}
    for *before, last in sorted(forms - {()}):
        after = banned.setdefault(len(before), {})
        after[tuple(before)] = (*after.get(tuple(before), ()), last)
    return banned
