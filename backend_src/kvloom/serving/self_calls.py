"""Calls to an engine's model inside Triton: forwarded requests, and calls that start or end its sequences."""

import logging
import queue
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.serving.control import PING
from kvloom.serving.parameters import self_call
from kvloom.serving.tensors import tensor

log = logging.getLogger(__name__)

START, END = 1, 2
"""Triton's sequence flags."""

QUEUE_TIMEOUT_US = 10_000_000
"""Maximum time that a call waits in Triton's queue, so that it does not wait for ever if all slots are taken."""


def call(
    model: str,
    conversation: int | str,
    flags: int,
    tensors: Sequence[Any],
    outputs: Sequence[str] = ("text_output",),
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """Create a ``pb_utils.InferenceRequest`` to an engine's model.

    Execute it in another thread than Triton's: inside ``execute()`` it may deadlock.
    """
    return pb_utils.InferenceRequest(
        model_name=model,
        requested_output_names=list(outputs),
        inputs=list(tensors),
        request_id=request_id,
        correlation_id=conversation,
        flags=flags,
        timeout=QUEUE_TIMEOUT_US,
        parameters=dict(parameters or {}),
    )


def control_call(
    model: str,
    text: str,
    conversation: int | str | None = None,
    flags: int = START | END,
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """Create a call with a `control` input. Its conversation is a new one unless ``conversation`` names one."""
    own = uuid.uuid4().hex if conversation is None else conversation
    return call(model, own, flags, [tensor("control", text)], parameters=parameters)


KEEP_S = 10.0
"""Seconds for which the responses of a call are kept after the last one."""


class Calls:
    """Executes calls and keeps their responses for ``KEEP_S`` seconds.

    Triton's stub keeps a table of each call's responses. Shortly after the last response has been read it removes them
    from the table, in a C++ thread that does not hold the GIL. Without another reference this would free the responses
    and the Python objects in them there, which corrupts the interpreter's memory and crashes the server.
    """

    def __init__(self) -> None:
        self._kept: deque[tuple[float, Any]] = deque()
        self._lock = threading.Lock()

    def responses(self, request: Any) -> Iterator[Any]:
        """Execute a ``pb_utils.InferenceRequest`` and yield its responses. The caller must read all of them."""
        iterator = request.exec(decoupled=True)
        try:
            yield from iterator
        finally:
            with self._lock:
                now = time.monotonic()
                self._kept.append((now, iterator))
                while now - self._kept[0][0] > KEEP_S:
                    self._kept.popleft()

    def stop(self) -> None:
        """Free all kept responses. Triton's stub crashes if they are freed after it."""
        with self._lock:
            self._kept.clear()


RETRY_S, TRIES = 0.2, 50
"""Seconds before a failed call is repeated, and the maximum number of tries. Calls fail until the model is ready."""

UNKNOWN = "START flag"
"""Part of Triton's error for a sequence id that it does not know."""


class SelfCalls:
    """Ends sequences in Triton that `llm` does not keep, and starts those that it has restored from its journal.

    `llm` calls itself in a separate thread. These calls do not change the engine's state. Clients may use the same ids
    at the same time. A conversation that a client starts is not ended: ``taken`` withdraws a call that has not been
    made yet. If the call is being made at that moment, ``ended`` is called and may start the sequence again.
    """

    def __init__(self, model: str, secret: str, ended: Callable[[int | str], None]):
        """Start the thread.

        Args:
            model: the name of the engine's model, which calls itself.
            secret: the server's secret, by which `llm` recognizes its own calls.
            ended: called with each id whose sequence has been ended in Triton. Must not block.
        """
        self._model = model
        self._secret = secret
        self._ended = ended
        self._lock = threading.Lock()
        # For each id the flag to send and the number of failed tries
        self._wanted: dict[int | str, tuple[int, int]] = {}
        self._inbox: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._calls = Calls()
        self._thread = threading.Thread(target=self._run, name="kvloom-self-calls", daemon=True)
        self._thread.start()

    def end(self, conversation: int | str) -> None:
        """End a conversation's sequence in Triton, which frees its slot."""
        self._want(conversation, END)

    def start(self, conversation: int | str) -> None:
        """Start a conversation's sequence in Triton, so that Triton accepts its turns though no client started it."""
        self._want(conversation, START)

    def taken(self, conversation: int | str) -> None:
        """Withdraw the pending call for a conversation, because a client has started it."""
        with self._lock:
            self._wanted.pop(conversation, None)

    def stop(self) -> None:
        """End the thread after its current call. Queued calls are dropped, since Triton stops too."""
        self._stopping.set()
        self._inbox.put(None)
        self._thread.join()
        self._calls.stop()

    def _want(self, conversation: int | str, flag: int) -> None:
        with self._lock:
            self._wanted[conversation] = (flag, 0)
        self._inbox.put(conversation)

    def _run(self) -> None:
        while (conversation := self._inbox.get()) is not None and not self._stopping.is_set():
            with self._lock:
                wanted = self._wanted.get(conversation)
            if wanted is None:
                continue
            flag, tries = wanted
            error = self._call(conversation, flag)
            with self._lock:
                # Neither withdrawn nor replaced during the call
                if self._wanted.get(conversation) is wanted:
                    if error is not None and tries + 1 < TRIES:
                        self._wanted[conversation] = (flag, tries + 1)
                        self._inbox.put(conversation)
                    else:
                        del self._wanted[conversation]
            if error is not None:
                level = logging.INFO if tries + 1 < TRIES else logging.ERROR
                what = "end" if flag == END else "start"
                log.log(level, "could not %s conversation %s in Triton: %s", what, conversation, error)
                self._stopping.wait(RETRY_S)
            elif flag == END:
                self._ended(conversation)

    def _call(self, conversation: int | str, flag: int) -> str | None:
        """Make one call. Returns the error text if it fails."""
        wrong: str | None = None
        try:
            for response in self._calls.responses(
                control_call(self._model, PING, conversation, flag, parameters=self_call(self._secret))
            ):
                if response.has_error():
                    wrong = response.error().message()
        except Exception as error:  # noqa: BLE001 the thread must go on with the other calls
            wrong = str(error)
        # A client may have ended the sequence in the meantime
        return None if wrong is not None and flag == END and UNKNOWN in wrong else wrong
