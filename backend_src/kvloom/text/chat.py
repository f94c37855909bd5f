"""Chat messages: parse them from a request and render them with the model's chat template."""

import json
from collections.abc import Sequence
from typing import Any

from jinja2 import TemplateError
from transformers import PreTrainedTokenizerFast

from kvloom.errors import InvalidArgument

Message = dict[str, Any]

# A template can raise these, besides Jinja's own errors, when it does not expect a message
_TEMPLATE_FAULTS = (TypeError, ValueError, LookupError, AttributeError, ArithmeticError, RecursionError)


ESCAPED, OTHER_KEYS = 6, 2**20
r"""JSON needs at most 6 characters for one (``\u0041``). 2**20 characters are allowed for keys no template renders."""


def parse_messages(text: str, max_characters: int | None = None) -> list[Message]:
    """Read the ``messages`` input: a JSON list of objects with a role and a content.

    The template gets a message's other keys unchanged.

    Args:
        text: the JSON.
        max_characters: the most characters a chat may have. A text that must exceed them is refused unparsed, since
            parsing holds Python's lock and so delays all other requests.

    Raises:
        InvalidArgument: the text is too long, not JSON, or an empty list; or a message has no string role or content.
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
        raise InvalidArgument("messages", "contain half of a surrogate pair; send valid Unicode") from error
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
    """Render messages with the model's chat template; ``answer`` adds the generation prompt.

    Raises:
        InvalidArgument: the model has no template, or the template refuses these messages. Quotes the template's error.
    """
    if not tokenizer.chat_template:
        raise InvalidArgument("messages", "this model has no chat template; send text_input instead")
    try:
        return tokenizer.apply_chat_template(list(messages), tokenize=False, add_generation_prompt=answer)
    except TemplateError as error:
        raise InvalidArgument("messages", f"refused by the model's chat template: {error}") from error
    except _TEMPLATE_FAULTS as error:
        raise InvalidArgument("messages", f"the model's chat template can't render them: {error}") from error
