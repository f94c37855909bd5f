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
        ├── ModelError            a model file is missing, broken or of an unsupported kind
        └── LaunchError           no tritonserver could be found, started or reached
"""

from typing import ClassVar


class KvloomError(Exception):
    """Base of everything kvloom raises on purpose."""


class RequestError(KvloomError):
    """One request failed. ``str()`` is what the client reads: ``CODE: message``."""

    code: ClassVar[str]

    def __init__(self, message: str):
        super().__init__(message)

    def __str__(self) -> str:
        return f"{self.code}: {self.args[0]}"


class InvalidArgument(RequestError):
    """The request is wrong; ``field`` is the input, key or limit at fault."""

    code = "INVALID_ARG"

    def __init__(self, field: str, message: str):
        super().__init__(f"{field}: {message}")
        self.field = field


class Unavailable(RequestError):
    """The server can't take the request now."""

    code = "UNAVAILABLE"


class NotFound(RequestError):
    """What the request refers to does not exist (any more)."""

    code = "NOT_FOUND"


class Cancelled(RequestError):
    """The request was ended by another one."""

    code = "CANCELLED"


class Internal(RequestError):
    """A fault of the server. The request is lost, the server goes on."""

    code = "INTERNAL"


def as_request_error(error: Exception) -> RequestError:
    """What a client hears of anything that was raised while its request was looked at."""
    return error if isinstance(error, RequestError) else Internal(f"the engine failed: {error}")


class SetupError(KvloomError):
    """The server can't start."""


class SettingsError(SetupError):
    """A setting is unknown, malformed or contradicts another."""


class ModelError(SetupError):
    """A model is missing, broken or not supported."""


class LaunchError(SetupError):
    """No tritonserver could be found, started or reached."""
