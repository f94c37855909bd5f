"""Calls from the models into `llm`: what is forwarded to it, and what it tells Triton about its own sequences."""

import logging
import queue
import threading
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kvloom.serving.control import PING

log = logging.getLogger(__name__)

START, END = 1, 2
"""Triton's sequence flags."""

QUEUE_TIMEOUT_US = 10_000_000
"""How long a call into `llm` may wait inside Triton: full slots there must not hold anybody for ever."""


def call(
    conversation: int | str,
    flags: int,
    tensors: Sequence[Any],
    outputs: Sequence[str] = ("text_output",),
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """A ``pb_utils.InferenceRequest`` to `llm`. Execute it in a thread of its own: inside execute() it may deadlock."""
    return pb_utils.InferenceRequest(
        model_name="llm",
        requested_output_names=list(outputs),
        inputs=list(tensors),
        request_id=request_id,
        correlation_id=conversation,
        flags=flags,
        timeout=QUEUE_TIMEOUT_US,
        parameters=dict(parameters or {}),
    )


def control_call(text: str, conversation: int | str | None = None, flags: int = START | END) -> Any:
    """A call with a `control` input, on a fresh conversation unless one is named."""
    own = uuid.uuid4().hex if conversation is None else conversation
    return call(own, flags, [tensor("control", text.encode(), np.object_)])


def tensor(name: str, value: object, dtype: type) -> Any:
    """A [1, 1] ``pb_utils.Tensor``."""
    return pb_utils.Tensor(name, np.array([[value]], dtype=dtype))


class Link:
    """Ends sequences in Triton that `llm` does not keep, from a thread of its own; changes no state of the engine."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="kvloom-link", daemon=True)
        self._thread.start()

    def end(self, conversation: int | str) -> None:
        """Free the slot that Triton still holds for a conversation."""
        self._inbox.put(conversation)

    def stop(self) -> None:
        """End the thread after the call it is in; what is queued is left, Triton goes down too."""
        while not self._inbox.empty():
            self._inbox.get()
        self._inbox.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (conversation := self._inbox.get()) is not None:
            try:
                for response in control_call(PING, conversation, END).exec(decoupled=True):
                    if response.has_error():
                        # the client itself ended or restarted it meanwhile
                        log.info("conversation %s: %s", conversation, response.error().message())
            except pb_utils.TritonModelException:
                log.exception("conversation %s could not be ended in Triton", conversation)
