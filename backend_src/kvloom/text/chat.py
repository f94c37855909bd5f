"""Chat messages as a request has them."""

import json
from typing import Any

from kvloom.errors import InvalidArgument

Message = dict[str, Any]

ESCAPED, OTHER_KEYS = 6, 2**20
r"""JSON needs at most 6 characters for one (``\u0041``). 2**20 characters are allowed for keys no template renders."""


def parse_messages(text: str, max_characters: int | None = None) -> list[Message]:
    """Read the ``messages`` input: a JSON list of objects with a role and a content, which is text or parts of text.

    Beside tool calls there may be no content. Other keys of a message are left for the template.

    Args:
        text: the JSON.
        max_characters: the most characters a chat may have. A text that must exceed them is refused unparsed, since
            parsing holds Python's lock and so delays all other requests.

    Raises:
        InvalidArgument: too long, not JSON, an empty list, a message without a string role, or whose content is of
            another kind; says which.
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
        if not isinstance(message.get("role"), str):
            raise InvalidArgument("messages", f"message {index}: role must be a string")
        fault = _fault_of_content(message)
        if fault:
            raise InvalidArgument("messages", f"message {index}: {fault}")
    return messages


def _fault_of_content(message: Message) -> str | None:
    content = message.get("content")
    if isinstance(content, str) or (content is None and (message.get("tool_calls") or message.get("function_call"))):
        return None
    if not isinstance(content, list) or not content:
        return 'content must be a string or a list of parts like {"type": "text", "text": "Hello"}'
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, dict) else None
        if not isinstance(kind, str):
            return f'content: part {index} must be an object like {{"type": "text", "text": "Hello"}}'
        if kind != "text":
            return f'content: part {index} is of type {kind!r}, which is not supported; supported: "text"'
        if not isinstance(part.get("text"), str):
            return f"content: part {index}: text must be a string"
    return None
