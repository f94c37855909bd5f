"""The `generate` model: the stateless door. Forwards each request to `llm` as a conversation of one turn."""

import json
import logging
import os
import threading
import uuid
from typing import Any

import numpy as np
import triton_python_backend_utils as pb_utils

from kvloom.errors import Internal, InvalidArgument, RequestError, SetupError, Unavailable
from kvloom.faults import logged
from kvloom.secret import server_secret
from kvloom.serving.cancel_watcher import CancelWatcher
from kvloom.serving.control import read_control
from kvloom.serving.inputs import outputs_asked_for, prompt_kind, read
from kvloom.serving.options import read_options
from kvloom.serving.parameters import forwarded, read_parameters
from kvloom.serving.self_calls import END, QUEUE_TIMEOUT_US, START, Calls, call, control_call
from kvloom.serving.sender import ERROR, Sender
from kvloom.serving.shared_memory import close_to_others
from kvloom.serving.tensors import tensor

log = logging.getLogger(__name__)

ENGINE, DEFAULT_ENGINE = "engine", "llm"
"""The parameter in config.pbtxt that names the model to forward to, and what it is where there is none."""

STREAM_INTERVAL_MS = 50
"""Least time between forwarded responses: each costs about 0.4 ms of processor time on its way."""


CANCEL_AGAIN_S = 0.2
"""Seconds after which a cancel that did not end the answer is repeated."""


class GenerateModel:
    """What Triton calls. Each request is forwarded by a thread of its own, which waits for the answer's responses.

    The number of threads is bounded by what `llm` lets in: it refuses the rest at once.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Start watching for clients that leave."""
        logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
        close_to_others()
        try:
            self._secret = server_secret(os.getppid())
        except SetupError as error:
            log.error("%s", error)
            raise pb_utils.TritonModelException(str(error)) from error
        parameters = json.loads(args["model_config"])["parameters"]
        self._engine = parameters[ENGINE]["string_value"] if ENGINE in parameters else DEFAULT_ENGINE
        self._watcher = CancelWatcher()
        self._calls = Calls()

    def execute(self, requests: list[Any]) -> None:
        """Start forwarding; returns at once."""
        for request in requests:
            sender = Sender(request)
            try:
                forward = _Forward(request, sender, self._calls, self._engine, self._secret)
                threading.Thread(target=forward.run, name="kvloom-forward", daemon=True).start()
                self._watcher.watch(sender, forward.cancel)
                continue
            except RequestError as error:
                # its text: the error itself would hold this frame, and the request in it, in a cycle
                refusal = str(error)
            except Exception as error:  # noqa: BLE001 Triton would fail every request of the batch
                log.exception("request %s could not be forwarded", request.request_id())
                refusal = str(Internal(f"the request could not be forwarded: {error}"))
            with logged(log, "a client could not be told of it"):
                sender.fail(refusal)

    def finalize(self) -> None:
        """Stop watching."""
        self._watcher.stop()
        self._calls.stop()


class _Forward:
    """One request on its way to the engine and back."""

    def __init__(self, request: Any, sender: Sender, calls: Calls, engine: str, secret: str):
        read_parameters(request.parameters(), None)
        inputs = read(request)
        if prompt_kind(inputs) == "control" and read_control(inputs).op != "ping":
            raise InvalidArgument("control", "generate takes only ping; it has no conversations")
        self._sender = sender
        self._calls = calls
        self._engine = engine
        self._ended = threading.Event()
        self._conversation = uuid.uuid4().hex
        self._asked = outputs_asked_for(inputs)
        options = read_options(inputs)
        ours = [
            tensor("stream", options.stream is True),
            tensor("stream_interval_ms", max(STREAM_INTERVAL_MS, options.stream_interval_ms)),
            # tells which response is the last one
            tensor("return_finish_reason", True),
        ]
        names = {own.name() for own in ours}
        # copies: what the request holds lies in shared memory that may be gone when the call is made
        given = [pb_utils.Tensor(name, np.array(value)) for name, value in inputs.items() if name not in names]
        self._call = call(
            engine,
            self._conversation,
            START | END,
            given + ours,
            ["text_output", "finish_reason", *(self._asked - {"finish_reason"})],
            request.request_id(),
            forwarded(request.parameters(), secret),
        )

    def run(self) -> None:
        """Pass the answer's responses on as they come; the last one ends the request."""
        try:
            for response in self._calls.responses(self._call):
                try:
                    self._pass_on(response)
                except Exception as error:  # noqa: BLE001 the responses are read to the end, see `Calls`
                    self._give_up(error)
            if not self._sender.closed:
                self._sender.fail(str(Internal("llm ended its answer without a last response")))
        except Exception as error:  # noqa: BLE001 its client would wait for ever
            self._give_up(error)
        finally:
            self._ended.set()

    def _pass_on(self, response: Any) -> None:
        if response.has_error():
            self._sender.fail(_error_text(response.error().message()))
            return
        # copies, likewise: Triton may still read what was sent when this response is freed
        outputs = {output.name(): np.array(output.as_numpy()) for output in response.output_tensors()}
        if not outputs:
            return
        reason = outputs["finish_reason"][0, 0].decode()
        if reason == ERROR:
            self._sender.fail(outputs["text_output"][0, 0].decode())
            return
        wanted = self._asked | {"text_output"}
        tensors = [pb_utils.Tensor(name, value) for name, value in outputs.items() if name in wanted]
        self._sender.send(tensors, bool(reason))

    def _give_up(self, error: Exception) -> None:
        """End the request after a fault; the watcher then cancels what `llm` still does for it."""
        log.exception("forwarding failed")
        ours = isinstance(error, pb_utils.TritonModelException)
        with logged(log, "a client could not be told of it"):
            self._sender.give_up(_error_text(str(error)) if ours else str(Internal(f"forwarding failed: {error}")))

    def cancel(self) -> None:
        """Tell `llm` that nobody waits for the answer any more; its last response ends the request, if need be."""
        threading.Thread(target=self._cancel, name="kvloom-forward-cancel", daemon=True).start()

    def _cancel(self) -> None:
        control = json.dumps({"op": "cancel", "conversation": self._conversation})
        while True:
            with logged(log, "an answer that nobody waits for could not be cancelled"):
                for response in self._calls.responses(control_call(self._engine, control)):
                    if response.has_error():
                        log.info("cancel: %s", response.error().message())
            # the request itself may still be on its way to `llm`, which then does not know it yet
            if self._ended.wait(CANCEL_AGAIN_S):
                return


def _error_text(text: str) -> str:
    """`llm`'s error as it is; Triton's expiry of a call as what it means."""
    if "timeout" in text.lower() and "expired" in text.lower():
        return str(Unavailable(f"no free slot for the request within {QUEUE_TIMEOUT_US // 1_000_000} s"))
    return text
