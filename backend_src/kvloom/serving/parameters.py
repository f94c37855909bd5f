"""Request parameters: the client's, and those that kvloom's models send each other."""

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

STRICT = "triton_grpc_error"
"""The metadata of a gRPC stream that Triton should close at an error. tritonserver passes it on as a parameter."""


@dataclass(frozen=True, slots=True)
class Parameters:
    """A request's parameters.

    Attributes:
        given: the client's parameters, without ``STRICT``.
        forwarded: whether `generate` forwards the request. It then takes errors as data, see ``Sender``.
        self_call: whether `llm` itself sent the request to start or end a sequence in Triton, see ``SelfCalls``.
    """

    given: dict[str, Any]
    forwarded: bool = False
    self_call: bool = False


def forwarded(given: str, secret: str) -> Mapping[str, str]:
    """Parameters for a call that forwards a client's request.

    Args:
        given: the client's parameters as JSON, because a call does not support all of their types.
        secret: the server's secret.
    """
    return {FORWARDED: given or "{}", SECRET: secret}


def self_call(secret: str) -> Mapping[str, str]:
    """Parameters for a call of `llm` to itself. ``secret`` is the server's secret."""
    return {SELF_CALL: "", SECRET: secret}


def on_strict_stream(text: str) -> bool:
    """Check whether a request came on a gRPC stream that Triton would close at an error.

    Args:
        text: the parameters as JSON, as Triton gives them.
    """
    return STRICT in json.loads(text or "{}")


def read_parameters(text: str, secret: str | None) -> Parameters:
    """Read a request's parameters.

    Args:
        text: the parameters as JSON, as Triton gives them.
        secret: the server's secret, which proves that one of kvloom's models made the call. None if only clients call.

    Raises:
        InvalidArgument: a client uses a name that is reserved for the models' own calls.
    """
    given = _given(text)
    own = [name for name in OWN if name in given]
    if not own:
        return Parameters(given)
    known = str(given.get(SECRET, "")).encode(errors="replace")
    if secret is None or not hmac.compare_digest(known, secret.encode()):
        raise InvalidArgument(own[0], "is reserved for calls between the server's models; leave it out")
    if FORWARDED in given:
        return Parameters(_given(given[FORWARDED]), forwarded=True)
    return Parameters({}, self_call=True)


def _given(text: str) -> dict[str, Any]:
    return {name: value for name, value in json.loads(text or "{}").items() if name != STRICT}
