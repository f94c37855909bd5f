"""Calls from the models into `llm`: what is forwarded to it, and what it tells Triton about its own sequences."""

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
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


KEEP_S = 10.0
"""Seconds for which the responses of a call are kept after its last one."""


class Calls:
    """Executes calls and keeps their responses for a while.

    Triton's stub lists each call's responses in a table of its own and takes them off it a moment after the last one
    was read, in a C++ thread that does not hold the GIL. If nobody else held them by then, they, and the Python objects
    inside, would be freed there: the interpreter's memory breaks, and the whole server dies with it.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def responses(self, request: Any) -> Iterator[Any]:
        """Execute a ``pb_utils.InferenceRequest`` and yield its responses; to be read to the end."""
        iterator = request.exec(decoupled=True)
        yield from iterator
        with self._lock:
            now = time.monotonic()
            self._kept.append((now, iterator))
            while now - self._kept[0][0] > KEEP_S:
                self._kept.popleft()

    def stop(self) -> None:
        """Let go of everything: what outlives the stub crashes when it is freed."""
        with self._lock:
            self._kept.clear()


class Link:
    """Ends sequences in Triton that `llm` does not keep, from a thread of its own; changes no state of the engine."""

    def __init__(self) -> None:
        self._inbox: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self._calls = Calls()
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
        self._calls.stop()

    def _run(self) -> None:
        while (conversation := self._inbox.get()) is not None:
            try:
                for response in self._calls.responses(control_call(PING, conversation, END)):
                    if response.has_error():
                        # the client itself ended or restarted it meanwhile
                        log.info("conversation %s: %s", conversation, response.error().message())
            except pb_utils.TritonModelException:
                log.exception("conversation %s could not be ended in Triton", conversation)
