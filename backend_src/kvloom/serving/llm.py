"""The `llm` model: Triton's Python-backend interface over the loop."""

import gc
import json
import logging
import os
import time
from contextlib import ExitStack
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom.config import Settings
from kvloom.conversation.registry import ConversationId, Turn
from kvloom.conversation.turns import Turns
from kvloom.engine.build import Assembly, assemble
from kvloom.engine.engine import Engine
from kvloom.engine.thread import Loop
from kvloom.errors import Internal, RequestError, SetupError
from kvloom.request import Sequence
from kvloom.secret import server_secret
from kvloom.serving.control import act
from kvloom.serving.metrics import Metrics
from kvloom.serving.outbox import Outbox, Senders
from kvloom.serving.parameters import Parameters, read_parameters
from kvloom.serving.parser import ControlCall, parse
from kvloom.serving.responses import encoder
from kvloom.serving.self_calls import END, START, Link
from kvloom.serving.sender import CancelWatcher, Sender
from kvloom.serving.shared_memory import close_to_others
from kvloom.serving.stream import ResponseStream, fail

log = logging.getLogger(__name__)

_NOT_SENT = Internal("the answer could not be sent")


class LlmModel:
    """What Triton calls. ``execute`` only enqueues; answers go out through ``Senders`` as they come."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, load the model, start the threads."""
        logging.basicConfig(format="kvloom: %(levelname)s %(name)s: %(message)s")
        close_to_others()
        parameters = json.loads(args["model_config"])["parameters"]
        with ExitStack() as on_error:
            try:
                settings = Settings.parse({key: value["string_value"] for key, value in parameters.items()})
                self._secret = server_secret(os.getppid())
                self._link = Link(self._secret, self._forgotten_by_triton)
                on_error.callback(self._link.stop)
                self._loop = Loop(lambda: self._assemble(settings))
            except SetupError as error:
                log.error("%s", error)
                raise pb_utils.TritonModelException(str(error)) from error
            on_error.pop_all()
        self._senders = Senders()
        self._watcher = CancelWatcher()
        self._admin_token = settings.admin_token
        self._metrics = Metrics(self._loop)

    def execute(self, requests: list[Any]) -> None:
        """Hand requests to the loop. A request that can't be served gets its error; the others are not touched."""
        arrival = time.monotonic()
        for request in requests:
            sender, outbox = Sender(request), self._senders.outbox()
            error: RequestError
            try:
                parameters = read_parameters(request.parameters(), self._secret)
                sender.errors_as_data = parameters.forwarded
                self._submit(request, parameters, sender, outbox, arrival)
                continue
            except RequestError as refused:
                # with its traceback it would hold this frame, and the request in it, in a cycle
                error = refused.with_traceback(None)
            except Exception as fault:  # noqa: BLE001 Triton would fail every request of the batch
                log.exception("request %s failed before it reached the engine", request.request_id())
                error = Internal(f"the request could not be read: {fault}")
            fail(outbox, sender, error)
            conversation, (_, end) = request.correlation_id(), _flags(request)
            self._loop.with_turns(partial(_refused, conversation=conversation, end=end))

    def finalize(self) -> None:
        """End every answer, send what is queued, stop the threads."""
        # first: a metric that changes while Triton unloads the model may wait for an answer that does not come
        self._metrics.stop()
        self._watcher.stop()
        self._link.stop()
        self._loop.stop()
        self._senders.stop()
        # what a cycle of references still holds of Triton's must not be freed after its stub
        gc.collect()

    def _assemble(self, settings: Settings) -> Engine:
        self._assembly: Assembly = assemble(settings, self._link)
        return self._assembly.engine

    def _forgotten_by_triton(self, conversation: ConversationId) -> None:
        self._loop.with_turns(lambda turns: turns.lifecycle.forgotten_by_triton(conversation))

    def _submit(self, request: Any, parameters: Parameters, sender: Sender, outbox: Outbox, arrival: float) -> None:
        conversation = request.correlation_id()
        start, end = _flags(request)
        tokenizer, limits = self._assembly.tokenizer, self._assembly.limits
        call = parse(request, parameters.given, start, tokenizer, limits, arrival)
        if isinstance(call, ControlCall):
            stream = ResponseStream(sender, outbox, encoder(call.outputs, tokenizer))
            act(call.control, conversation, self._loop, limits.kv_dtype, self._admin_token, stream)
            # after what it asks for: a refused one is heard of in `execute`
            self._loop.with_turns(lambda turns: _follow(turns, conversation, end, parameters.self_call))
            return
        sequence = Sequence(call.request)
        encode = encoder(call.outputs, tokenizer, sequence, call.echo)
        stream = ResponseStream(sender, outbox, encode, call.interval_s)
        new = call.prompt
        self._loop.take_turn(
            Turn(conversation, sequence, stream, start, end, new.messages, new.rendered, new.text, call.kv)
        )
        self._watcher.watch(sender, lambda: self._loop.cancel(sequence, _NOT_SENT if sender.given_up else None))


def _flags(request: Any) -> tuple[bool, bool]:
    """Whether a request begins and ends its sequence in Triton."""
    flags = request.flags()
    return bool(flags & START), bool(flags & END)


def _refused(turns: Turns, conversation: ConversationId, end: bool) -> None:
    turns.lifecycle.refused(conversation, end)


def _follow(turns: Turns, conversation: ConversationId, end: bool, own_call: bool) -> None:
    """Do what the flags of a control request mean for its own conversation."""
    if end and not own_call:
        turns.lifecycle.ended_in_triton(conversation)
    elif not end:
        turns.lifecycle.began_in_triton(conversation)
