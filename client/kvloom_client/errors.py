"""What can go wrong, as seen by a client.

::

    KvloomClientError
    ├── RequestFailed             the server answered with an error; ``text`` is what it said
    │   ├── InvalidArgument       INVALID_ARG   the request itself is wrong
    │   ├── Unavailable           UNAVAILABLE   a limit of the server; try again later
    │   ├── NotFound              NOT_FOUND     what the request refers to is gone
    │   │   └── UnknownSequence   Triton itself knows no sequence of this id; the engine was not asked
    │   ├── Cancelled             CANCELLED     another request ended this one
    │   ├── Internal              INTERNAL      a fault of the server, confined to this request
    │   ├── AccessDenied          a proxy in front of the server wants other ``headers``, or another certificate
    │   └── ServerError           any other text: Triton itself refused or lost the request
    └── TransportError            the answer did not arrive (whole)
        ├── ConnectionFailed      no connection, or it broke
        ├── AnswerTimeout         the answer took longer than the caller's ``timeout``
        └── IncompleteAnswer      the stream ended without the mark of a last response
"""


class KvloomClientError(Exception):
    """Base of everything this library raises on purpose."""


class RequestFailed(KvloomClientError):
    """The server answered with an error.

    Attributes:
        text: the server's words, the code included.
    """

    def __init__(self, text: str):
        super().__init__(text)
        self.text = text


class InvalidArgument(RequestFailed):
    """The request is wrong; the text names the field and what it takes."""


class Unavailable(RequestFailed):
    """The server can't take the request now; the same request may succeed later."""


class NotFound(RequestFailed):
    """What the request refers to does not exist (any more)."""


class UnknownSequence(NotFound):
    """Triton knows no sequence of this id, and so refused a turn without asking the engine."""


class Cancelled(RequestFailed):
    """Another request ended this one."""


class Internal(RequestFailed):
    """A fault of the server, confined to this request."""


class AccessDenied(RequestFailed):
    """Who asks is not let in: HTTP 401 and 403, and what gRPC calls UNAUTHENTICATED and PERMISSION_DENIED."""


class ServerError(RequestFailed):
    """An error without a code of kvloom's: Triton itself refused or lost the request."""


class TransportError(KvloomClientError):
    """The answer did not arrive, or not whole."""


class ConnectionFailed(TransportError):
    """No connection to the server, or it broke.

    Attributes:
        sent: whether the server may have got the request; False when no connection came about.
    """

    def __init__(self, text: str, *, sent: bool = True):
        super().__init__(text)
        self.sent = sent


class AnswerTimeout(TransportError):
    """The answer took longer than the caller allowed."""


class IncompleteAnswer(TransportError):
    """The stream ended without the mark of a last response."""


_BY_CODE: dict[str, type[RequestFailed]] = {
    "INVALID_ARG": InvalidArgument,
    "UNAVAILABLE": Unavailable,
    "NOT_FOUND": NotFound,
    "CANCELLED": Cancelled,
    "INTERNAL": Internal,
}


_UNKNOWN_SEQUENCE = "must specify the START flag"
"""What Triton says of a turn of a sequence that it does not know."""


def request_error(text: str) -> RequestFailed:
    """The error that an error text of the server stands for; only the text travels through Triton."""
    if _UNKNOWN_SEQUENCE in text:
        return UnknownSequence(text)
    return _BY_CODE.get(text.partition(":")[0], ServerError)(text)


def access_denied(url: str, reason: str) -> AccessDenied:
    """The error of a call to ``url`` that was not let in."""
    return AccessDenied(f"{url} lets nobody in without permission ({reason}): give it in headers=...")


def connection_error(url: str, port: str, reason: str, *, sent: bool, tls: bool = False) -> ConnectionFailed:
    """The error of a connection that failed.

    Args:
        url: where to.
        port: which of Triton's ports it should be.
        reason: what happened.
        sent: whether the request may have reached the server.
        tls: whether it was the encryption that failed.
    """
    if tls:
        advice = (
            "its certificate is not trusted: give the file of who signed it, Tls(ca_file=...)"
            if "certificate verify failed" in reason.lower().replace("_", " ")
            else "does it speak TLS, does it ask for a client's certificate, is the URL's host the certificate's?"
        )
        return ConnectionFailed(f"no encrypted connection to {url} ({reason}): {advice}", sent=False)
    if sent:
        return ConnectionFailed(
            f"the connection to {url} broke ({reason}); the server may have ended, or was started anew", sent=True
        )
    return ConnectionFailed(
        f"no server answers at {url} ({reason}): is it running, and is that Triton's {port} port? `kvloom serve` "
        "prints its addresses when it is ready",
        sent=False,
    )
