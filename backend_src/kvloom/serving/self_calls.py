"""Calls into an engine's model: what is forwarded to it, and what it tells Triton about its own sequences."""

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
"""How long a call may wait inside Triton: full slots there must not hold anybody for ever."""


def call(
    model: str,
    conversation: int | str,
    flags: int,
    tensors: Sequence[Any],
    outputs: Sequence[str] = ("text_output",),
    request_id: str = "",
    parameters: Mapping[str, Any] | None = None,
) -> Any:
    """A ``pb_utils.InferenceRequest`` to an engine's model.

    Execute it in a thread of its own: inside execute() it may deadlock.
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
    """A call with a `control` input, on a fresh conversation unless one is named."""
    own = uuid.uuid4().hex if conversation is None else conversation
    return call(model, own, flags, [tensor("control", text)], parameters=parameters)


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
        try:
            yield from iterator
        finally:
            with self._lock:
                now = time.monotonic()
                self._kept.append((now, iterator))
                while now - self._kept[0][0] > KEEP_S:
                    self._kept.popleft()

    def stop(self) -> None:
        """Let go of everything: what outlives the stub crashes when it is freed."""
        with self._lock:
            self._kept.clear()


RETRY_S, TRIES = 0.2, 50
"""Pause after a call that did not come through, as before the model is ready, and how often it is made."""

UNKNOWN = "START flag"
"""Part of what Triton says of an id that it does not know."""


class SelfCalls:
    """Ends sequences in Triton that `llm` does not keep, and starts those that it keeps from an earlier life.

    `llm` calls itself, from a thread of its own; such calls change no state of the engine. Its clients act on the same
    ids meanwhile. What they start is not ended: `taken` takes back what is not done yet, and what was being done just
    then is told to `ended`, which may have it started again.
    """

    def __init__(self, model: str, secret: str, ended: Callable[[int | str], None]):
        """Start the thread.

        Args:
            model: the engine's own, which calls itself.
            secret: the server's, by which `llm` knows its own calls.
            ended: told of each id that Triton has been made to forget; must not block.
        """
        self._model = model
        self._secret = secret
        self._ended = ended
        self._lock = threading.Lock()
        # the flag that each id shall get, and how often that was tried
        self._wanted: dict[int | str, tuple[int, int]] = {}
        self._inbox: queue.SimpleQueue[int | str | None] = queue.SimpleQueue()
        self._stopping = threading.Event()
        self._calls = Calls()
        self._thread = threading.Thread(target=self._run, name="kvloom-self-calls", daemon=True)
        self._thread.start()

    def end(self, conversation: int | str) -> None:
        """Free the slot that Triton holds for a conversation."""
        self._want(conversation, END)

    def start(self, conversation: int | str) -> None:
        """Let Triton take turns of a conversation that no client has started with it."""
        self._want(conversation, START)

    def taken(self, conversation: int | str) -> None:
        """A client has started a conversation of this id."""
        with self._lock:
            self._wanted.pop(conversation, None)

    def stop(self) -> None:
        """End the thread after the call it is in; what is queued is left, Triton goes down too."""
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
                # neither taken back meanwhile nor replaced
                if self._wanted.get(conversation) is wanted:
                    if error is not None and tries + 1 < TRIES:
                        self._wanted[conversation] = (flag, tries + 1)
                        self._inbox.put(conversation)
                    else:
                        del self._wanted[conversation]
            if error is not None:
                level = logging.INFO if tries + 1 < TRIES else logging.ERROR
                what = "ended" if flag == END else "started"
                log.log(level, "conversation %s could not be %s in Triton: %s", conversation, what, error)
                self._stopping.wait(RETRY_S)
            elif flag == END:
                self._ended(conversation)

    def _call(self, conversation: int | str, flag: int) -> str | None:
        """Make one call; returns what went wrong."""
        wrong: str | None = None
        try:
            for response in self._calls.responses(
                control_call(self._model, PING, conversation, flag, parameters=self_call(self._secret))
            ):
                if response.has_error():
                    wrong = response.error().message()
        except Exception as error:  # noqa: BLE001 what comes after it would never be done
            wrong = str(error)
        # a client may have ended it meanwhile
        return None if wrong is not None and flag == END and UNKNOWN in wrong else wrong
