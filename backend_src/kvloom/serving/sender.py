"""Triton's response sender, made safe. Knows nothing of the engine."""

import threading
from collections.abc import Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.serving.tensors import tensor

ERROR = "error"
"""The finish_reason of an error that is sent as data."""

MAX_ERROR = 2000
"""Characters of an error text; a client's own words may be part of it."""


class Sender:
    """Sends one request's responses and exactly one final mark; what follows it goes nowhere.

    Triton dies when is_cancelled() runs during or after the final send, so both take one lock.

    Attributes:
        closed: the final mark was sent.
        left: nobody waits for what is on its way: the client was seen to be gone, or was given up.
        given_up: the latter.
        errors_as_data: an error is a response with finish_reason ``error`` and its text as text_output: where one
            model calls another, Triton loses an error that comes after a response, and its final mark with it.
    """

    def __init__(self, request: Any):
        """Take over the responses of a ``pb_utils.InferenceRequest``."""
        self.closed = self.left = self.given_up = self.errors_as_data = False
        self._sender = request.get_response_sender()
        self._lock = threading.Lock()

    def send(self, tensors: Sequence[Any], final: bool) -> None:
        """Send a response with these ``pb_utils.Tensor``.

        Raises:
            TritonModelException: the connection broke; Triton marks the request as cancelled.
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
        """Send an error as the final response, though more of the answer may be on its way."""
        self.left = self.given_up = True
        self.fail(text)

    def cancelled(self) -> bool:
        """Look whether nobody waits for what is on its way, see ``left``."""
        with self._lock:
            # set only: who gives up does so without the lock
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
    """An error text that Triton can carry: valid UTF-8, without NUL (which would cut it), of bounded length."""
    clean = text.encode(errors="backslashreplace").decode().replace("\0", "\\0")
    return clean if len(clean) <= MAX_ERROR else clean[:MAX_ERROR] + " ..."
