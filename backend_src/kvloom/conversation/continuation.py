"""Continues a conversation with new chat messages: finds the tokens that the model's chat template adds for them."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import TYPE_CHECKING

from kvloom.errors import InvalidArgument

if TYPE_CHECKING:
    from kvloom.text.chat import Message
    from kvloom.text.special_tokens import ChatText
    from kvloom.text.tokenizer import Tokenizer

_BEFORE = ({"role": "user", "content": "x"}, {"role": "assistant", "content": "y"})
"""Used instead of the earlier messages if they are not known."""


@dataclass(slots=True)
class ChatHistory:
    """The messages of a conversation whose turns were all chat messages.

    Attributes:
        messages: all messages, including the answers.
        rendered: the rendered messages up to the start of the last answer. If it is empty, they must be rendered again.
        marks: for each answer, where it starts: (tokens of the conversation, characters of the rendered text).
    """

    messages: "list[Message]" = field(default_factory=list)
    rendered: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, said: "Sequence[Message]", rendered: str, kept: int, tokens: int) -> None:
        """Add a turn's messages and the answer to them.

        Args:
            said: the messages and the answer.
            rendered: the rendered conversation up to the start of the answer.
            kept: how many tokens of the earlier history stayed as they were.
            tokens: the number of tokens up to the start of the answer.
        """
        self.messages += said
        self.rendered = rendered
        self.marks = [mark for mark in self.marks if mark[0] <= kept] + [(tokens, len(rendered))]


@dataclass(frozen=True, slots=True)
class Continuation:
    """The tokens that a turn adds to a conversation.

    Attributes:
        keep: how many tokens of the conversation stay. Fewer than all if the template renders earlier messages
            differently than before.
        ids: the token ids that follow them.
        rendered: the text of the whole conversation; empty if it is not known.
    """

    keep: int
    ids: list[int]
    rendered: str = ""


def answer_text(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """An answer as a message's content: all generated tokens except the end token."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids, skip_special_tokens=False)


def continue_chat(
    tokenizer: "Tokenizer", history: Sequence[int], chat: ChatHistory | None, new: "Sequence[Message]", max_tokens: int
) -> Continuation:
    """Continue a conversation with new messages.

    The last answer is closed as the template closes it, unless it already ended with an end token. The template renders
    the whole conversation. If it renders earlier messages differently than before, the tokens from there on are
    replaced. Many templates do so: they leave out the thinking of earlier answers.

    Args:
        tokenizer: the model's tokenizer.
        history: the conversation's token ids.
        chat: the conversation as messages; None if a turn was raw text. Then nothing is replaced.
        new: the new messages.
        max_tokens: the maximum number of tokens of a conversation.

    Raises:
        InvalidArgument: the template rejects the messages, or they are too long.
    """
    if chat is None:
        return Continuation(len(history), _after_answer(tokenizer, history, _follow_up(tokenizer, new), max_tokens))
    whole = tokenizer.render_chat([*chat.messages, *new])
    before = (chat.rendered or tokenizer.render_chat(chat.messages[:-1]).text) + chat.messages[-1]["content"]
    if whole.text.startswith(before):
        after = _after_answer(tokenizer, history, whole.since(len(before)), max_tokens)
        return Continuation(len(history), after, whole.text)
    same = len(commonprefix([before, whole.text]))
    tokens, characters = max((mark for mark in chat.marks if mark[1] <= same), default=(0, 0))
    if tokens:
        after = tokenizer.encode_after(history[tokens - 1], whole.since(characters), "messages", max_tokens)
    else:
        after = tokenizer.encode_rendered(whole, max_tokens)
    ids = [*history[:tokens], *after]
    keep = next(
        (place for place, (old, new) in enumerate(zip(history, ids, strict=False)) if old != new),
        min(len(history), len(ids) - 1),
    )
    return Continuation(keep, ids[keep:], whole.text)


def _after_answer(tokenizer: "Tokenizer", history: Sequence[int], text: "ChatText", max_tokens: int) -> list[int]:
    """The ids of the text that follows an answer, without the end token if the answer has already ended with one."""
    ids = tokenizer.encode_after(history[-1], text, "messages", max_tokens)
    if history[-1] in tokenizer.eos_ids:
        end = next((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), None)
        # A template may write whitespace before the end token
        if end is not None and not tokenizer.decode(ids[:end], skip_special_tokens=False).strip():
            return ids[end + 1 :]
    return ids


def _follow_up(tokenizer: "Tokenizer", new: "Sequence[Message]") -> "ChatText":
    """The text that the template renders after an answer, for any earlier messages."""
    before = tokenizer.render_chat(_BEFORE[:1]).text + "y"
    whole = tokenizer.render_chat([*_BEFORE, *new])
    if not whole.text.startswith(before):
        raise InvalidArgument(
            "messages", "this model's chat template can't continue a conversation that has turns of raw text"
        )
    return whole.since(len(before))
