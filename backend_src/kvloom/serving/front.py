"""The `generate` model: the stateless door. Forwards each request to `llm` as a conversation of one turn."""

import json
import logging
import threading
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kvloom.errors import Internal, InvalidArgument, RequestError, Unavailable
from kvloom.serving.control import read_control
from kvloom.serving.fields import RETURNED, flag, one, prompt_kind, read
from kvloom.serving.sender import CancelWatcher, Sender

log = logging.getLogger(__name__)

START_END = 3
"""Triton's sequence flags START and END."""

STREAM_INTERVAL_MS = 50
"""Least time between forwarded responses: each costs about 0.4 ms of processor time on its way."""

QUEUE_TIMEOUT_US = 10_000_000
"""How long a call into `llm` may wait inside Triton: full slots there must not hold anybody for ever."""


class GenerateModel:
    """What Triton calls. Each request is forwarded by a thread of its own, which waits for the answer's responses.

    The number of threads is bounded by what `llm` lets in: it refuses the rest at once.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Start watching for clients that leave."""
        logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
        self._watcher = CancelWatcher()

    def execute(self, requests: list[Any]) -> None:
        """Start forwarding; returns at once."""
        for request in requests:
            sender = Sender(request)
            try:
                forward = _Forward(request, sender)
            except RequestError as error:
                sender.fail(str(error))
                continue
            except Exception as error:  # noqa: BLE001 Triton would fail every request of the batch
                log.exception("request %s could not be forwarded", request.request_id())
                sender.fail(str(Internal(f"the request could not be read: {error}")))
                continue
            self._watcher.watch(sender, forward.cancel)
            threading.Thread(target=forward.run, name="kvloom-forward", daemon=True).start()

    def finalize(self) -> None:
        """Stop watching."""
        self._watcher.stop()


class _Forward:
    """One request on its way to `llm` and back."""

    def __init__(self, request: Any, sender: Sender):
        inputs = read(request)
        if prompt_kind(inputs) == "control" and read_control(inputs).op != "ping":
            raise InvalidArgument("control", "generate takes only ping; it has no conversations")
        self._sender = sender
        self._conversation = uuid.uuid4().hex
        self._asked = {output for name, output in RETURNED.items() if flag(inputs, name, False)}
        interval = max(STREAM_INTERVAL_MS, one(inputs, "stream_interval_ms") if "stream_interval_ms" in inputs else 0)
        ours = [
            _tensor("stream", flag(inputs, "stream", False), np.bool_),
            _tensor("stream_interval_ms", interval, np.int32),
            # tells which response is the last one
            _tensor("return_finish_reason", True, np.bool_),
        ]
        names = {tensor.name() for tensor in ours}
        tensors = [tensor for tensor in request.inputs() if tensor.name() not in names] + ours
        self._call = _call(
            self._conversation,
            tensors,
            ["text_output", *self._asked, "finish_reason"],
            request.request_id(),
            json.loads(request.parameters() or "{}"),
        )

    def run(self) -> None:
        """Pass the answer's responses on as they come; the last one ends the request."""
        try:
            for response in self._call.exec(decoupled=True):
                if response.has_error():
                    self._sender.fail(_error_text(response.error().message()))
                    break
                tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
                if not tensors:
                    continue
                final = tensors["finish_reason"].as_numpy()[0, 0] != b""
                self._sender.send([t for name, t in tensors.items() if name in self._asked | {"text_output"}], final)
            if not self._sender.closed:
                self._sender.fail(str(Internal("llm ended its answer without a last response")))
        except pb_utils.TritonModelException as error:
            log.exception("forwarding failed")
            if not self._sender.closed:
                self._sender.fail(_error_text(str(error)))

    def cancel(self) -> None:
        """Tell `llm` that nobody waits for the answer any more; its last response then ends the request."""
        control = json.dumps({"op": "cancel", "conversation": self._conversation})
        call = _call(uuid.uuid4().hex, [_tensor("control", control.encode(), np.object_)], ["text_output"], "", {})

        def run() -> None:
            for response in call.exec(decoupled=True):
                if response.has_error():
                    # it ended by itself meanwhile
                    log.info("cancel: %s", response.error().message())

        threading.Thread(target=run, name="kvloom-forward-cancel", daemon=True).start()


def _call(conversation: str, tensors: list[Any], outputs: list[str], request_id: str, parameters: dict) -> Any:
    return pb_utils.InferenceRequest(
        model_name="llm",
        requested_output_names=outputs,
        inputs=tensors,
        request_id=request_id,
        correlation_id=conversation,
        flags=START_END,
        timeout=QUEUE_TIMEOUT_US,
        parameters=parameters,
    )


def _tensor(name: str, value: object, dtype: type) -> Any:
    return pb_utils.Tensor(name, np.array([[value]], dtype=dtype))


def _error_text(text: str) -> str:
    """`llm`'s error as it is; Triton's expiry of a call as what it means."""
    if "timeout" in text.lower() and "expired" in text.lower():
        return str(Unavailable(f"no free slot for the request within {QUEUE_TIMEOUT_US // 1_000_000} s"))
    return text
