"""How a conversation goes on with new chat messages: only what is new, in the words of the model's chat template."""

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
"""Stands for a conversation whose text is not known as messages."""


@dataclass(slots=True)
class ChatHistory:
    """A conversation of which every turn was one of messages.

    Attributes:
        messages: all of them, the answers included.
        rendered: what the template made of them, up to where the last answer begins; empty: to be made again.
        marks: (tokens of the conversation, characters of its text) up to where each answer begins.
    """

    messages: "list[Message]" = field(default_factory=list)
    rendered: str = ""
    marks: list[tuple[int, int]] = field(default_factory=list)

    def add(self, said: "Sequence[Message]", rendered: str, kept: int, tokens: int) -> None:
        """Messages and the answer to them were added.

        Before the answer the conversation was ``rendered``, and ``tokens`` tokens long; ``kept`` of them as before.
        """
        self.messages += said
        self.rendered = rendered
        self.marks = [mark for mark in self.marks if mark[0] <= kept] + [(tokens, len(rendered))]


@dataclass(frozen=True, slots=True)
class Continuation:
    """What a turn adds to a conversation.

    Attributes:
        keep: how many tokens of the conversation stay; all of them, unless the template now writes them otherwise.
        ids: what follows them.
        rendered: the whole conversation's text; empty where that is not known.
    """

    keep: int
    ids: list[int]
    rendered: str = ""


def answer_text(tokenizer: "Tokenizer", ids: Sequence[int]) -> str:
    """An answer as a message's content: all that was generated, but the end token."""
    return tokenizer.decode(ids[:-1] if ids and ids[-1] in tokenizer.eos_ids else ids, skip_special_tokens=False)


def continue_chat(
    tokenizer: "Tokenizer", history: Sequence[int], chat: ChatHistory | None, new: "Sequence[Message]", max_tokens: int
) -> Continuation:
    """Continue a conversation with new messages.

    The last answer is closed as the template closes it, unless it ended by an end token of the model's. The template
    renders the whole conversation: where it writes earlier messages otherwise than before (many do not repeat what a
    model thought before its answer), the tokens from there on are replaced.

    Args:
        tokenizer: of the model.
        history: the conversation's token ids.
        chat: the conversation as messages; None where some turn was none: nothing is replaced then.
        new: the new messages.
        max_tokens: tokens that a conversation may have.

    Raises:
        InvalidArgument: the template refuses the messages, or they are too long.
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
    """The ids of what follows an answer; the end token that closes it may be there already."""
    ids = tokenizer.encode_after(history[-1], text, "messages", max_tokens)
    if history[-1] in tokenizer.eos_ids:
        end = next((place for place, token in enumerate(ids) if token in tokenizer.eos_ids), None)
        # a template may write a blank before it
        if end is not None and not tokenizer.decode(ids[:end], skip_special_tokens=False).strip():
            return ids[end + 1 :]
    return ids


def _follow_up(tokenizer: "Tokenizer", new: "Sequence[Message]") -> "ChatText":
    """What the template writes from the end of an answer on, whatever came before it."""
    before = tokenizer.render_chat(_BEFORE[:1]).text + "y"
    whole = tokenizer.render_chat([*_BEFORE, *new])
    if not whole.text.startswith(before):
        raise InvalidArgument(
            "messages", "this model's chat template can't continue a conversation that has turns without messages"
        )
    return whole.since(len(before))
