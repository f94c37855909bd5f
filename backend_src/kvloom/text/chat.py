"""Chat messages: reading them from a request and writing them out with the model's chat template."""

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from kvloom.errors import InvalidArgument

Message = dict[str, Any]

# What code in a template raises when it meets a message it was not written for, besides Jinja's own errors
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


_HELLO, _REPLY = {"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}
_SYSTEM, _RESULT = {"role": "system", "content": "z"}, {"role": "tool", "content": "r", "name": "f"}
_SOME_CHATS = ([_HELLO, _REPLY, _HELLO], [_SYSTEM, _HELLO, _REPLY, _HELLO], [_HELLO, _REPLY, _RESULT])

ESCAPED, OTHER_KEYS = 6, 2**20
"""The most characters that JSON takes for one, and those that are granted to what no template may write out."""


def parse_messages(text: str, max_characters: int | None = None) -> list[Message]:
    """Read the ``messages`` input: a JSON list of objects with a role and a content.

    Other keys of a message are left for the template.

    Args:
        text: the JSON.
        max_characters: that a chat may have. What is certain to have more is refused without being parsed, which
            holds up everybody else.

    Raises:
        InvalidArgument: too long, not JSON, an empty list, or a message without a string role and content; says which.
    """
    if max_characters is not None and len(text) > ESCAPED * max_characters + OTHER_KEYS:
        raise InvalidArgument("messages", f"have {len(text)} characters; a chat that fits the context has fewer")
    try:
        messages = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument("messages", f"not valid JSON: {error}") from error
    try:
        json.dumps(messages, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise InvalidArgument("messages", "hold half of a surrogate pair; send valid Unicode") from error
    if not isinstance(messages, list) or not messages:
        raise InvalidArgument("messages", 'must be a non-empty JSON list like [{"role": "user", "content": "Hello"}]')
    for index, message in enumerate(messages):
        if not isinstance(message, dict):
            raise InvalidArgument("messages", f"message {index} must be an object with role and content")
        for key in ("role", "content"):
            if not isinstance(message.get(key), str):
                raise InvalidArgument("messages", f"message {index}: {key} must be a string")
    return messages


def render(tokenizer: PreTrainedTokenizerFast, messages: Sequence[Message], answer: bool = True) -> str:
    """Write messages out with the model's chat template; with ``answer``, up to where the assistant's begins.

    Raises:
        InvalidArgument: the model has no template, or the template refuses these messages, in the template's words.
    """
    if not tokenizer.chat_template:
        raise InvalidArgument("messages", "this model has no chat template; send text_input instead")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
    except TemplateError as error:
        raise InvalidArgument("messages", f"refused by the model's chat template: {error}") from error
    except _TEMPLATE_FAULTS as error:
        raise InvalidArgument("messages", f"the model's chat template can't render them: {error}") from error


def some_turns(tokenizer: PreTrainedTokenizerFast) -> str:
    """Chats of every role that the chat template knows, as it writes them; "" without a template."""
    written = []
    for messages in _SOME_CHATS:
        try:
            written.append(render(tokenizer, messages, answer=False))
        except InvalidArgument:  # not every template knows systems or tools
            continue
    return "".join(written)
