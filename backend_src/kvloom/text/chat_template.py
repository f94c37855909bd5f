"""A model's chat template: messages to text."""

import re
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from kvloom.errors import InvalidArgument
from kvloom.text.chat import Message

# What code in a template raises when it meets a message it was not written for, besides Jinja's own errors
_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)

_QUESTION: Message = {"role": "user", "content": "x"}
_REPLY: Message = {"role": "assistant", "content": "y"}
_AROUND: dict[str, tuple[list[Message], list[Message]]] = {
    "system": ([], [_QUESTION, _REPLY, _QUESTION]),
    "user": ([], []),
    "assistant": ([_QUESTION], [_QUESTION]),
    "tool": ([_QUESTION, _REPLY], []),
}
"""What stands before and after a message of each role, for finding out how a template writes it."""

_SOME_TEXT, _MORE_TEXT = "kvloom-1", "kvloom-2"
_PRINTED_PART = re.compile(r"""["']type["']:\s*["']text["']""")
"""As JSON and Python print a part, where a template takes the list for text."""


class ChatTemplate:
    """Writes chats as a model knows them. Safe to use from several threads.

    Args:
        tokenizer: with the template, or without one.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerFast):
        self._tokenizer = tokenizer
        written = {role: self._written(role, _SOME_TEXT) for role in _AROUND}
        of_parts = {role: self._written(role, _parts(_SOME_TEXT, _MORE_TEXT)) for role in _AROUND}
        self._reads_parts = {role for role in _AROUND if _reads(of_parts[role], written[role])}
        self._reads_only_parts = {role for role in self._reads_parts if _SOME_TEXT not in written[role].lower()}

        self.turns = "".join(written.values())
        """Some messages of every role that the template knows, as it writes them."""

    def after_answer(self) -> str:
        """What the template writes after an assistant's last message; "" if it refuses such a chat."""
        chat = [self._readable(message) for message in (_QUESTION, {**_REPLY, "content": _SOME_TEXT})]
        try:
            return self._apply(chat, answer=False).rpartition(_SOME_TEXT)[2]
        except InvalidArgument:
            return ""

    def render(self, messages: Sequence[Message], answer: bool = True) -> str:
        """Write messages out; with ``answer``, up to where the assistant's begins.

        Content in parts is joined by line ends where the template does not read parts itself.

        Raises:
            InvalidArgument: the model has no template, or the template refuses these messages, in the template's words.
        """
        readable = [self._readable(message) for message in messages]
        try:
            return self._apply(readable, answer)
        except InvalidArgument:
            if all("content" in message for message in readable):
                raise
        # some templates want a content beside tool calls
        return self._apply([{"content": ""} | message for message in readable], answer)

    def _readable(self, message: Message) -> Message:
        """A message as the template can read it."""
        content, role = message.get("content"), message["role"] if message["role"] in _AROUND else "user"
        if content is None:
            return {key: value for key, value in message.items() if key != "content"}
        if isinstance(content, str):
            return message | {"content": _parts(content)} if role in self._reads_only_parts else message
        return (
            message if role in self._reads_parts else message | {"content": "\n".join(part["text"] for part in content)}
        )

    def _written(self, role: str, content: str | list[Message]) -> str:
        """A message of a role with what stands around it; "" where the template refuses it."""
        before, after = _AROUND[role]
        try:
            return self._apply([*before, {"role": role, "content": content, "name": "f"}, *after], answer=False)
        except InvalidArgument:
            return ""

    def _apply(self, messages: list[Message], answer: bool) -> str:
        if not self._tokenizer.chat_template:
            raise InvalidArgument("messages", "this model has no chat template; send text_input instead")
        try:
            return self._tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=answer)
        except TemplateError as error:
            raise InvalidArgument("messages", f"refused by the model's chat template: {error}") from error
        except _FAULTS as error:
            raise InvalidArgument("messages", f"the model's chat template can't render them: {error}") from error


def _parts(*texts: str) -> list[dict[str, Any]]:
    return [{"type": "text", "text": text} for text in texts]


def _reads(of_parts: str, of_text: str) -> bool:
    """Whether a template reads parts, judged by what it makes of two parts and of a text."""
    of_parts, of_text = of_parts.lower(), of_text.lower()
    printed = len(_PRINTED_PART.findall(of_parts)) > len(_PRINTED_PART.findall(of_text))
    return _SOME_TEXT in of_parts and _MORE_TEXT in of_parts and not printed
