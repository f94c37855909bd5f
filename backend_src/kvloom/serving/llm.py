"""The `llm` model: Triton's Python-backend interface over the engine thread."""

import gc
import json
import logging
import os
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import triton_python_backend_utils as pb_utils

from kvloom import progress
from kvloom.config import Settings
from kvloom.conversation.registry import ConversationId, Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.engine.build import BuiltEngine, build_engine
from kvloom.engine.engine import Engine
from kvloom.engine.thread import EngineThread
from kvloom.errors import Internal, RequestError, SetupError
from kvloom.paths import readable
from kvloom.request import Sequence
from kvloom.secret import server_secret
from kvloom.serving.cancel_watcher import CancelWatcher
from kvloom.serving.control import act
from kvloom.serving.inputs import Inputs
from kvloom.serving.intake import Intake
from kvloom.serving.metrics import Metrics
from kvloom.serving.outbox import Outbox, Senders
from kvloom.serving.parameters import Parameters, on_strict_stream, read_parameters
from kvloom.serving.parser import parse, receive
from kvloom.serving.process import prepare
from kvloom.serving.responses import encoder
from kvloom.serving.self_calls import END, START, SelfCalls
from kvloom.serving.sender import Sender
from kvloom.serving.stream import ResponseStream, fail

log = logging.getLogger(__name__)

Refuse = Callable[[RequestError], None]
"""Ends a request with an error."""

_NOT_SENT = Internal("the answer could not be sent")


class LlmModel:
    """The class that Triton calls. Requests come in through ``Intake``; responses go out through ``Senders``."""

    def initialize(self, args: dict[str, str]) -> None:
        """Read the settings, load the model, start the threads."""
        prepare()
        progress.log.setLevel(logging.INFO)
        config, model = json.loads(args["model_config"]), args["model_name"]
        with ExitStack() as on_error:
            try:
                settings = Settings.parse({key: value["string_value"] for key, value in config["parameters"].items()})
                settings.check_slots(int(config["sequence_batching"]["oldest"]["max_candidate_sequences"]))
                self._secret = server_secret(os.getppid())
                self._self_calls = SelfCalls(model, self._secret, self._forgotten_by_triton)
                on_error.callback(self._self_calls.stop)
                self._engine_thread = EngineThread(lambda: self._build(settings))
            except SetupError as error:
                log.error("%s", error)
                raise pb_utils.TritonModelException(readable(str(error))) from error
            on_error.pop_all()
        self._senders = Senders()
        self._intake = Intake()
        self._watcher = CancelWatcher()
        self._admin_token = settings.admin_token
        self._metrics = Metrics(self._engine_thread, model)

    def execute(self, requests: list[Any]) -> None:
        """Accept requests and return at once. A request that can't be served gets an error; the others go on."""
        arrival = time.monotonic()
        for request in requests:
            self._receive(request, arrival)

    def finalize(self) -> None:
        """End every answer, send all queued responses, stop the threads."""
        # First: an update of a metric may hang while Triton unloads the model
        self._metrics.stop()
        self._watcher.stop()
        self._self_calls.stop()
        self._intake.stop()
        self._engine_thread.stop()
        self._senders.stop()
        # Triton's objects in reference cycles must be freed before Triton's stub is
        gc.collect()

    def _build(self, settings: Settings) -> Engine:
        self._built: BuiltEngine = build_engine(settings, self._self_calls)
        return self._built.engine

    def _forgotten_by_triton(self, conversation: ConversationId) -> None:
        self._engine_thread.with_turns(lambda turns: turns.manager.forgotten_by_triton(conversation))

    def _receive(self, request: Any, arrival: float) -> None:
        conversation, sender, outbox = request.correlation_id(), Sender(request), self._senders.outbox()
        refuse = partial(self._refuse, request, sender, outbox)
        take = partial(self._take, request, sender, outbox, arrival, refuse)
        # A refusal waits at the intake behind the conversation's earlier requests, so that they reach the engine first
        _attempt(take, lambda error: self._intake.put(conversation, lambda: refuse(error)))

    def _take(self, request: Any, sender: Sender, outbox: Outbox, arrival: float, refuse: Refuse) -> None:
        """Copy a request's tensors, and queue the rest of the work at the intake."""
        sender.errors_as_data = on_strict_stream(request.parameters())
        parameters = read_parameters(request.parameters(), self._secret)
        sender.errors_as_data |= parameters.forwarded
        inputs, call = receive(request)
        conversation = request.correlation_id()
        if call is None:
            submit = partial(self._submit, request, parameters, inputs, sender, outbox, arrival)
            self._intake.put(conversation, lambda: _attempt(submit, refuse))
            return
        stream = ResponseStream(sender, outbox, encoder(call.outputs, self._built.tokenizer))
        kv_dtype = self._built.limits.kv_dtype
        do = partial(act, call.control, conversation, self._engine_thread, kv_dtype, self._admin_token, stream)
        # Earlier requests to the conversation that the control request names are handled first
        meant = conversation if call.control.conversation is None else call.control.conversation
        self._intake.do(meant, lambda: _attempt(do, partial(fail, outbox, sender)))
        follow = partial(_follow, conversation=conversation, end=_flags(request)[1], own_call=parameters.self_call)
        self._intake.do(conversation, lambda: self._engine_thread.with_turns(follow))

    def _submit(
        self,
        request: Any,
        parameters: Parameters,
        inputs: Inputs,
        sender: Sender,
        outbox: Outbox,
        arrival: float,
    ) -> None:
        """Parse a turn and pass it to the engine thread."""
        start, end = _flags(request)
        tokenizer, limits = self._built.tokenizer, self._built.limits
        call = parse(request.request_id(), inputs, parameters.given, start, tokenizer, limits, arrival)
        sequence = Sequence(call.request)
        encode = encoder(call.outputs, tokenizer, sequence, call.echo)
        stream = ResponseStream(sender, outbox, encode, call.interval_s)
        conversation, new = request.correlation_id(), call.prompt
        self._engine_thread.take_turn(
            Turn(conversation, sequence, stream, start, end, new.messages, new.rendered, new.text, call.kv)
        )
        self._watcher.watch(
            sender, lambda: self._engine_thread.cancel(sequence, _NOT_SENT if sender.given_up else None)
        )

    def _refuse(self, request: Any, sender: Sender, outbox: Outbox, error: RequestError) -> None:
        """End a request with an error. The manager ends its sequence in Triton if no conversation needs it."""
        fail(outbox, sender, error)
        refused = partial(_refused, conversation=request.correlation_id(), end=_flags(request)[1])
        self._engine_thread.with_turns(refused)


def _attempt(work: Callable[[], None], refuse: Refuse) -> None:
    """Run a part of the work on a request. If it fails, ``refuse`` gets the error."""
    error: RequestError
    try:
        work()
        return
    except RequestError as refused:
        # Its traceback refers to frames, which would keep the request alive in a cycle
        error = refused.with_traceback(None)
    except Exception as fault:  # noqa: BLE001 otherwise Triton fails every request of the batch
        log.exception("a request failed before it reached the engine")
        error = Internal(f"the request could not be read: {fault}")
    refuse(error)


def _flags(request: Any) -> tuple[bool, bool]:
    """Whether a request starts and ends its sequence in Triton."""
    flags = request.flags()
    return bool(flags & START), bool(flags & END)


def _refused(turns: TurnScheduler, conversation: ConversationId, end: bool) -> None:
    turns.manager.refused(conversation, end)


def _follow(turns: TurnScheduler, conversation: ConversationId, end: bool, own_call: bool) -> None:
    """Apply the sequence flags of a control request to its own conversation."""
    if end and not own_call:
        turns.manager.ended_in_triton(conversation)
    elif not end:
        turns.manager.began_in_triton(conversation)
