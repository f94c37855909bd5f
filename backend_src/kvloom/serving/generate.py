"""The `generate` model, the stateless endpoint. Forwards each request to `llm` as a conversation of one turn."""

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
from kvloom.serving.parameters import forwarded, on_strict_stream, read_parameters
from kvloom.serving.process import prepare
from kvloom.serving.self_calls import END, QUEUE_TIMEOUT_US, START, Calls, call, control_call
from kvloom.serving.sender import ERROR, Sender
from kvloom.serving.tensors import tensor

log = logging.getLogger(__name__)

ENGINE, DEFAULT_ENGINE = "engine", "llm"
"""The parameter in config.pbtxt that names the model to forward to, and its default."""

STREAM_INTERVAL_MS = 50
"""Minimum time between forwarded responses. Forwarding one takes about 0.4 ms of CPU time."""


CANCEL_AGAIN_S = 0.2
"""Seconds after which a cancel is repeated if the answer has not ended."""


class GenerateModel:
    """The class that Triton calls. A separate thread forwards each request and waits for its responses.

    The number of threads is bounded by the number of requests that `llm` accepts, because `llm` refuses the rest at
    once.
    """

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings and start watching for clients that leave."""
        prepare()
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
        """Start to forward the requests, and return at once."""
        for request in requests:
            sender = Sender(request)
            try:
                forward = _Forward(request, sender, self._calls, self._engine, self._secret)
                threading.Thread(target=forward.run, name="kvloom-forward", daemon=True).start()
                self._watcher.watch(sender, forward.cancel)
                continue
            except RequestError as error:
                # Only the text is kept: the error refers to this frame and so would keep the request alive in a cycle
                refusal = str(error)
            except Exception as error:  # noqa: BLE001 otherwise Triton fails every request of the batch
                log.exception("could not forward request %s", request.request_id())
                refusal = str(Internal(f"the request could not be forwarded: {error}"))
            with logged(log, "could not send a client its error"):
                sender.fail(refusal)

    def finalize(self) -> None:
        """Stop watching."""
        self._watcher.stop()
        self._calls.stop()


class _Forward:
    """Forwards one request to the engine's model and its responses to the client."""

    def __init__(self, request: Any, sender: Sender, calls: Calls, engine: str, secret: str):
        sender.errors_as_data = on_strict_stream(request.parameters())
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
            # Needed to recognize the last response
            tensor("return_finish_reason", True),
        ]
        names = {own.name() for own in ours}
        # Copies: the request's tensors lie in shared memory that Triton may free before the call is made
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
        """Forward the responses as they come. The last one ends the request."""
        try:
            for response in self._calls.responses(self._call):
                try:
                    self._pass_on(response)
                except Exception as error:  # noqa: BLE001 the responses must be read to the end, see `Calls`
                    self._give_up(error)
            if not self._sender.closed:
                self._sender.fail(str(Internal("llm ended its answer without a last response")))
        except Exception as error:  # noqa: BLE001 otherwise the client waits for ever
            self._give_up(error)
        finally:
            self._ended.set()

    def _pass_on(self, response: Any) -> None:
        if response.has_error():
            self._sender.fail(_error_text(response.error().message()))
            return
        # Copies: Triton may still read the tensors that were sent when this response is freed
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
        """End the request with an error. The watcher then cancels the answer in `llm`."""
        log.exception("could not forward an answer")
        ours = isinstance(error, pb_utils.TritonModelException)
        with logged(log, "could not send a client its error"):
            self._sender.give_up(_error_text(str(error)) if ours else str(Internal(f"forwarding failed: {error}")))

    def cancel(self) -> None:
        """Cancel the answer in `llm`. Its last response ends the request unless it has already ended."""
        threading.Thread(target=self._cancel, name="kvloom-forward-cancel", daemon=True).start()

    def _cancel(self) -> None:
        control = json.dumps({"op": "cancel", "conversation": self._conversation})
        while True:
            with logged(log, "could not cancel an answer whose client has left"):
                for response in self._calls.responses(control_call(self._engine, control)):
                    if response.has_error():
                        log.info("could not cancel an answer: %s", response.error().message())
            # The cancel may reach `llm` before the request does, and then has no effect
            if self._ended.wait(CANCEL_AGAIN_S):
                return


def _error_text(text: str) -> str:
    """The error text for the client: `llm`'s own text, or a clear one if the call timed out in Triton's queue."""
    if "timeout" in text.lower() and "expired" in text.lower():
        return str(Unavailable(f"no free slot for the request within {QUEUE_TIMEOUT_US // 1_000_000} s"))
    return text
