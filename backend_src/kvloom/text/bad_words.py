"""What ``bad_words`` forbids, in tokens. Plain Python: computed once for a request, looked up in every step."""

from collections.abc import Iterable

from kvloom.request import Banned
from kvloom.text.tokenizer import Tokenizer


def banned_tokens(tokenizer: Tokenizer, words: Iterable[str]) -> Banned:
    """The tokens that would complete a word, by the tokens that come before.

    As in vLLM, a word is tokenized with and without a space before it. Other ways to spell it in tokens stay possible.

    Raises:
        InvalidArgument: a word holds half of a surrogate pair.
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
