"""The `llm` model: Triton's Python-backend interface over the loop."""

import json
import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.assemble import assemble
from kvloom.config import Settings
from kvloom.errors import Internal, InvalidArgument, RequestError, SetupError
from kvloom.loop import Loop
from kvloom.serving.metrics import Metrics
from kvloom.serving.stream import CancelWatcher, ResponseStream, Senders
from kvloom.serving.wire import decode

log = logging.getLogger(__name__)

START, END = 1, 2
"""Triton's sequence flags."""


class LlmModel:
    """What Triton calls. ``execute`` only enqueues; answers go out through the senders as they come."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, load the model, start the threads."""
        logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
        parameters = json.loads(args["model_config"])["parameters"]
        try:
            settings = Settings.parse({key: value["string_value"] for key, value in parameters.items()})
            assembly = assemble(settings)
        except SetupError as error:
            raise pb_utils.TritonModelException(str(error)) from error
        self._tokenizer = assembly.tokenizer
        self._loop = Loop(assembly.engine)
        self._senders = Senders()
        self._watcher = CancelWatcher(self._loop)
        self._metrics = Metrics(self._loop)
        self._loop.start()

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the loop. A request that can't be served gets its error; the others are not touched."""
        for request in requests:
            stream = self._senders.open(request.get_response_sender())
            try:
                self._submit(request, stream)
            except RequestError as error:
                stream.fail(error)
            except Exception as error:  # noqa: BLE001 Triton would fail every request of the batch
                log.exception("request %s failed before it reached the engine", request.request_id())
                stream.fail(Internal(f"the request could not be read: {error}"))

    def finalize(self) -> None:
        """End every answer, send what is queued, stop the threads."""
        self._watcher.stop()
        self._loop.stop()
        self._senders.stop()
        self._metrics.stop()

    def _submit(self, request: Any, stream: ResponseStream) -> None:
        if request.flags() != START | END:
            raise InvalidArgument(
                "sequence_start, sequence_end",
                "set both on every request; conversations of several turns are not supported yet",
            )
        call = decode(request, self._tokenizer)
        stream.call = call
        self._watcher.watch(stream, self._loop.submit(call.request, stream))
