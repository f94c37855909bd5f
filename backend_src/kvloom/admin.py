"""Tokens of those who may stop a server from taking requests."""

import hashlib
import hmac

PREFIX = "sha256:"


def digest(token: str) -> str:
    """What stands for a token where others may read: it can't be turned back, and does not admit anybody itself."""
    return PREFIX + hashlib.sha256(token.encode()).hexdigest()


def digests(setting: str, *more: str) -> str:
    """The setting ``admin_token`` without any token in clear text; ``more`` tokens are added to it."""
    given = [token if token.startswith(PREFIX) else digest(token) for token in setting.split(",") if token]
    return ",".join([*given, *map(digest, more)])


def admits(setting: str, token: str) -> bool:
    """Whether ``token`` is one of those that the setting ``admin_token`` lists, as they are or as digests."""
    given = digest(token)
    return any(hmac.compare_digest(given, known) for known in digests(setting).split(","))
