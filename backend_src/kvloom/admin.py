"""Tokens of those who may stop a server from taking requests."""

import hashlib
import hmac

PREFIX = "sha256:"

NO_TOKEN = (
    "drain needs one, and this server has none: start it with the setting admin_token, in llm's config.pbtxt or by "
    "kvloom serve --set admin_token=..."
)
# the launcher's own token is always there, so nobody can tell here whether the setting was given
WRONG_TOKEN = (
    "is not this server's: drain needs the one that kvloom serve was given by --set admin_token=... or llm's "
    "config.pbtxt; where none was given, Ctrl-C or SIGTERM to kvloom serve drains it, too, and stops it"
)


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
