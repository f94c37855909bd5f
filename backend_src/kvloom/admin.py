"""Admin tokens, which allow a client to drain a server."""

import hashlib
import hmac

PREFIX = "sha256:"

NO_TOKEN = (
    "drain needs one, and this server has none: start it with the setting admin_token, in llm's config.pbtxt or by "
    "kvloom serve --set admin_token=..."
)
# The launcher always adds its own token, so it is unknown here whether the operator has set one
WRONG_TOKEN = (
    "is not this server's: drain needs the token of the setting admin_token, from kvloom serve --set admin_token=... "
    "or llm's config.pbtxt; if there is none, Ctrl-C or SIGTERM to kvloom serve drains the server, too, and stops it"
)


def digest(token: str) -> str:
    """A token's digest, which is safe to show: it does not reveal the token and is not accepted as one."""
    return PREFIX + hashlib.sha256(token.encode()).hexdigest()


def digests(setting: str, *more: str) -> str:
    """The setting ``admin_token`` with every token replaced by its digest. ``more`` tokens are added."""
    given = [token if token.startswith(PREFIX) else digest(token) for token in setting.split(",") if token]
    return ",".join([*given, *map(digest, more)])


def admits(setting: str, token: str) -> bool:
    """Whether the setting ``admin_token`` contains ``token`` or its digest."""
    given = digest(token)
    return any(hmac.compare_digest(given, known) for known in digests(setting).split(","))
