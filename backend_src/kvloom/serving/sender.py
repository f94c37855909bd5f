"""A safe form of Triton's response sender. Does not depend on the engine."""

import threading
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.serving.tensors import tensor

ERROR = "error"
"""The finish_reason of an error that is sent as data."""

MAX_ERROR = 2000
"""Maximum length of an error text in characters. It may quote the client's input."""


class Sender:
    """Sends one request's responses, with exactly one final response. Responses after the final one are dropped.

    Triton crashes if ``is_cancelled()`` runs during or after the final send, so both hold the same lock.

    Attributes:
        closed: whether the final response was sent.
        left: whether the client no longer waits for responses: it has left, or ``give_up`` was called.
        given_up: whether ``give_up`` was called.
        errors_as_data: whether an error is sent as a response with finish_reason ``error`` and the text in
            text_output. Two callers need it. When a model calls another model, Triton loses an error that follows a
            response, together with its final flag. When a client asks for ``triton_grpc_error``, an error closes its
            stream, and Triton 2.51 crashes at the next response of another request on that stream.
    """

    def __init__(self, request: Any):
        """Create the sender of a ``pb_utils.InferenceRequest``."""
        self.closed = self.left = self.given_up = self.errors_as_data = False
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Any], final: bool) -> None:
        """Send a response with these tensors (``pb_utils.Tensor``).

        Raises:
            TritonModelException: the connection broke. Triton marks the request as cancelled.
        """
        self._send(pb_utils.InferenceResponse(list(tensors)), final)

    def fail(self, text: str) -> None:
        """Send an error as the final response."""
        text = _travels(text)
        if self.errors_as_data:
            self.send([tensor("text_output", text), tensor("finish_reason", ERROR)], True)
        else:
            self._send(pb_utils.InferenceResponse(error=pb_utils.TritonError(text)), True)

    def give_up(self, text: str) -> None:
        """Send an error as the final response. Later responses of the answer are dropped."""
        self.left = self.given_up = True
        self.fail(text)

    def cancelled(self) -> bool:
        """Check whether the client has left, and return ``left``."""
        with self._lock:
            # Only ever set to True here, because give_up sets it without the lock
            if not self.left and not self.closed and self._sender.is_cancelled():
                self.left = True
        return self.left

    def _send(self, response: Any, final: bool) -> None:
        with self._lock:
            if self.closed:
                return
            self.closed = final
            self._sender.send(response, pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL if final else 0)


def _travels(text: str) -> str:
    """An error text that Triton can send: valid UTF-8, of bounded length, without NUL, which would truncate it."""
    clean = text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return clean if len(clean) <= MAX_ERROR else clean[:MAX_ERROR] + " ..."
