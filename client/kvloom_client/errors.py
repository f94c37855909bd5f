"""The errors that the clients raise.

::

    KvloomClientError
    ├── RequestFailed             the server answered with an error; ``text`` is its message
    │   ├── InvalidArgument       INVALID_ARG   the request itself is wrong
    │   ├── Unavailable           UNAVAILABLE   a limit of the server; try again later
    │   ├── NotFound              NOT_FOUND     what the request refers to is gone
    │   │   └── UnknownSequence   Triton has no sequence with this id; the engine has not seen the request
    │   ├── Cancelled             CANCELLED     another request ended this one
    │   ├── Internal              INTERNAL      a fault of the server, confined to this request
    │   ├── AccessDenied          a proxy in front of the server requires other ``headers`` or another certificate
    │   └── ServerError           any other error: Triton itself refused or lost the request
    └── TransportError            the answer did not arrive completely
        ├── ConnectionFailed      no connection, or it broke
        ├── AnswerTimeout         the answer took longer than the caller's ``timeout``
        └── IncompleteAnswer      the stream ended without a last response
"""


class KvloomClientError(Exception):
    """The base of all errors that this library raises on purpose."""


class RequestFailed(KvloomClientError):
    """The server answered with an error.

    Attributes:
        text: the server's message, including the code.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


class InvalidArgument(RequestFailed):
    """The request is wrong. The text names the field and what it takes."""


class Unavailable(RequestFailed):
    """The server can't take the request at the moment. The same request may succeed later."""


class NotFound(RequestFailed):
    """The request refers to something that does not exist or was dropped."""


class UnknownSequence(NotFound):
    """Triton has no sequence with this id and so refused a turn. The engine has not seen it."""


class Cancelled(RequestFailed):
    """Another request ended this one."""


class Internal(RequestFailed):
    """A fault of the server, confined to this request."""


class AccessDenied(RequestFailed):
    """The server denies access: HTTP status 401 or 403, or gRPC's UNAUTHENTICATED or PERMISSION_DENIED."""


class ServerError(RequestFailed):
    """An error without one of kvloom's codes: Triton itself refused or lost the request."""


class TransportError(KvloomClientError):
    """The answer did not arrive completely."""


class ConnectionFailed(TransportError):
    """There was no connection to the server, or it broke.

    Attributes:
        sent: whether the server may have received the request; False if there was no connection.
    """

    def __init__(self, text: str, *, sent: bool = True):
        super().__init__(text)
        self.sent = sent


class AnswerTimeout(TransportError):
    """The answer took longer than the caller allowed."""


class IncompleteAnswer(TransportError):
    """The stream ended without a last response."""


_BY_CODE: dict[str, type[RequestFailed]] = {
    "INVALID_ARG": InvalidArgument,
    "UNAVAILABLE": Unavailable,
    "NOT_FOUND": NotFound,
    "CANCELLED": Cancelled,
    "INTERNAL": Internal,
}


_UNKNOWN_SEQUENCE = "must specify the START flag"
"""A part of Triton's error for a turn of a sequence that it does not know."""


def request_error(text: str) -> RequestFailed:
    """The typed error for an error text of the server. Triton transports only the text."""
    if _UNKNOWN_SEQUENCE in text:
        return UnknownSequence(text)
    return _BY_CODE.get(text.partition(":")[0], ServerError)(text)


def access_denied(url: str, reason: str) -> AccessDenied:
    """The error of a call to ``url`` without the right permission."""
    return AccessDenied(f"{url} denied access ({reason}): give credentials in headers=...")


def connection_error(url: str, port: str, reason: str, *, sent: bool, tls: bool = False) -> ConnectionFailed:
    """The error of a connection that failed.

    Args:
        url: the server's address.
        port: which of Triton's ports it should be, "gRPC" or "HTTP".
        reason: the reason, from the library.
        sent: whether the request may have reached the server.
        tls: whether the TLS handshake failed.
    """
    if tls:
        advice = (
            "its certificate is not trusted; give the CA that signed it with Tls(ca_file=...)"
            if "certificate verify failed" in reason.lower().replace("_", " ")
            else "check that it uses TLS, whether it requires a client certificate, and that its certificate is for "
            "the URL's host"
        )
        return ConnectionFailed(f"no encrypted connection to {url} ({reason}): {advice}", sent=False)
    if sent:
        return ConnectionFailed(
            f"the connection to {url} broke ({reason}); the server may have ended or restarted", sent=True
        )
    return ConnectionFailed(
        f"no server answers at {url} ({reason}): check that it runs and that this is Triton's {port} port; `kvloom "
        "serve` prints its addresses when it is ready",
        sent=False,
    )
