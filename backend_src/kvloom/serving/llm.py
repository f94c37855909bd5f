"""The `llm` model: Triton's Python-backend interface over the loop."""

import gc
import json
import logging
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.assemble import Assembly, assemble
from kvloom.config import Settings
from kvloom.engine import Engine
from kvloom.errors import Internal, InvalidArgument, RequestError, SetupError
from kvloom.loop import Loop
from kvloom.serving.control import read_control
from kvloom.serving.fields import FORWARDED, prompt_kind, read, returned
from kvloom.serving.link import END, START, Link
from kvloom.serving.metrics import Metrics
from kvloom.serving.sender import CancelWatcher, Sender
from kvloom.serving.stream import Outboxes, ResponseStream, fail
from kvloom.serving.turns import Turns
from kvloom.serving.wire import decode, encoder

log = logging.getLogger(__name__)


class LlmModel:
    """What Triton calls. ``execute`` only enqueues; answers go out through the outboxes as they come."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, load the model, start the threads."""
        logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
        parameters = json.loads(args["model_config"])["parameters"]
        try:
            settings = Settings.parse({key: value["string_value"] for key, value in parameters.items()})
            self._loop = Loop(lambda: self._assemble(settings))
        except SetupError as error:
            log.error("%s", error)
            raise pb_utils.TritonModelException(str(error)) from error
        self._outboxes = Outboxes()
        self._watcher = CancelWatcher()
        self._link = Link()
        self._turns = Turns(self._loop, self._assembly.limits.kv_dtype, settings.admin_token)
        self._metrics = Metrics(self._loop)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the loop. A request that can't be served gets its error; the others are not touched."""
        for request in requests:
            forwarded = FORWARDED in json.loads(request.parameters() or "{}")
            sender, outbox = Sender(request, errors_as_data=forwarded), self._outboxes.take()
            try:
                self._submit(request, sender, outbox)
            except RequestError as error:
                fail(outbox, sender, error)
            except Exception as error:  # noqa: BLE001 Triton would fail every request of the batch
                log.exception("request %s failed before it reached the engine", request.request_id())
                fail(outbox, sender, Internal(f"the request could not be read: {error}"))

    def finalize(self) -> None:
        """End every answer, send what is queued, stop the threads."""
        # first: a metric that changes while Triton unloads the model may wait for an answer that does not come
        self._metrics.stop()
        self._watcher.stop()
        self._link.stop()
        self._loop.stop()
        self._outboxes.stop()
        # what a cycle of references still holds of Triton's must not be freed after its stub
        gc.collect()

    def _assemble(self, settings: Settings) -> Engine:
        self._assembly: Assembly = assemble(settings)
        return self._assembly.engine

    def _submit(self, request: Any, sender: Sender, outbox: Any) -> None:
        inputs = read(request)
        kind = prompt_kind(inputs)
        conversation = request.correlation_id()
        tokenizer = self._assembly.tokenizer
        if kind == "control":
            encode = encoder(returned(inputs), tokenizer)
            self._turns.control(read_control(inputs), conversation, ResponseStream(sender, outbox, encode))
            return
        if request.flags() != START | END:
            if request.flags() == START:
                self._link.end(conversation)
            raise InvalidArgument(
                "sequence_start, sequence_end",
                "set both on every request; conversations of several turns are not supported yet",
            )
        call = decode(request, kind, inputs, tokenizer, self._assembly.limits)
        encode = encoder(call.outputs, tokenizer, len(call.request.prompt_ids), call.echo)
        stream = ResponseStream(sender, outbox, encode, call.interval_s)
        sequence = self._loop.submit(call.request, stream)
        self._turns.add(conversation, sender, sequence)
        self._watcher.watch(sender, lambda: self._loop.cancel(sequence))
