"""The request parameters: the client's own, and what kvloom's models tell each other by them."""

import hmac
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvloom.errors import InvalidArgument

FORWARDED = "kvloom_forwarded"
SELF_CALL = "kvloom_link"
SECRET = "kvloom_secret"
OWN = (FORWARDED, SELF_CALL, SECRET)


@dataclass(frozen=True, slots=True)
class Parameters:
    """The request parameters of a request.

    Attributes:
        given: the client's.
        forwarded: another model passes it on, and takes errors as data, see ``Sender``.
        self_call: `llm` tells Triton something about its sequences by it, see ``SelfCalls``.
    """

    given: dict[str, Any]
    forwarded: bool = False
    self_call: bool = False


def forwarded(given: str, secret: str) -> Mapping[str, str]:
    """Parameters of a call that passes a client's request on.

    Args:
        given: the client's, in JSON: a call can't have all of their types.
        secret: the server's.
    """
    return {FORWARDED: given or "{}", SECRET: secret}


def self_call(secret: str) -> Mapping[str, str]:
    """Parameters of a call of `llm` to itself; ``secret`` is the server's."""
    return {SELF_CALL: "", SECRET: secret}


def read_parameters(text: str, secret: str | None) -> Parameters:
    """Read the parameters of a request.

    Args:
        text: what Triton gives, JSON.
        secret: the server's, which shows that a model of kvloom has made the call; None where only clients call.

    Raises:
        InvalidArgument: a client uses names that are for the models' own calls.
    """
    given: dict[str, Any] = json.loads(text or "{}")
    own = [name for name in OWN if name in given]
    if not own:
        return Parameters(given)
    known = str(given.get(SECRET, "")).encode(errors="replace")
    if secret is None or not hmac.compare_digest(known, secret.encode()):
        raise InvalidArgument(own[0], "is for calls that the server's models make themselves; leave it out")
    if FORWARDED in given:
        return Parameters(json.loads(given[FORWARDED]), forwarded=True)
    return Parameters({}, self_call=True)
