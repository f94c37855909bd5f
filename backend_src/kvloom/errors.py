"""The exception tree.

::

    KvloomError
    ├── RequestError              one request failed; its text begins with the code and travels through Triton
    │   ├── InvalidArgument       INVALID_ARG   the request itself is wrong
    │   ├── Unavailable           UNAVAILABLE   a limit of the server; try again later
    │   ├── NotFound              NOT_FOUND     what the request refers to is gone
    │   ├── Cancelled             CANCELLED     another request ended this one
    │   └── Internal              INTERNAL      a fault of the server, confined to this request
    └── SetupError                nothing can be served; raised before the first request
        ├── SettingsError         a setting is unknown, malformed or contradicts another
        ├── ModelError            a model file is missing, broken or not supported
        └── LaunchError           no tritonserver could be found, started or reached
"""

from typing import ClassVar


class KvloomError(Exception):
    """The base of all errors that kvloom raises on purpose."""


class RequestError(KvloomError):
    """One request failed. ``str()`` is the text that the client gets: ``CODE: message``."""

    code: ClassVar[str]

    def __init__(self, message: str):
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.code}: {self.args[0]}"


class InvalidArgument(RequestError):
    """The request is wrong. ``field`` is the wrong input or key, or the exceeded limit."""

    code = "INVALID_ARG"

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class Unavailable(RequestError):
    """The server can't take the request at the moment."""

    code = "UNAVAILABLE"


class NotFound(RequestError):
    """The request refers to something that does not exist, or was dropped."""

    code = "NOT_FOUND"


class Cancelled(RequestError):
    """Another request ended this one."""

    code = "CANCELLED"


class Internal(RequestError):
    """A fault of the server. The request fails, but the server continues."""

    code = "INTERNAL"


def as_request_error(error: Exception) -> RequestError:
    """The error to send to the client for any exception that its request caused."""
    return error if isinstance(error, RequestError) else Internal(f"the engine failed: {error}")


class SetupError(KvloomError):
    """The server can't start."""


class SettingsError(SetupError):
    """A setting is unknown, malformed or contradicts another."""


class ModelError(SetupError):
    """A model is missing, broken or not supported."""


class LaunchError(SetupError):
    """No tritonserver could be found, started or reached."""
