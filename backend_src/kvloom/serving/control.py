"""The `control` input, which acts on conversations and on the server instead of asking for an answer."""

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvloom.admin import NO_TOKEN, WRONG_TOKEN, admits
from kvloom.conversation.registry import ConversationId
from kvloom.errors import InvalidArgument, RequestError
from kvloom.request import Delta, FinishReason, Sink
from kvloom.serving.inputs import Inputs, json_object, one, validate

if TYPE_CHECKING:
    # `generate` imports this module and must not load the engine
    from kvloom.conversation.turn_scheduler import TurnScheduler
    from kvloom.engine.thread import EngineThread

PING = json.dumps({"op": "ping"})

_ConversationId = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1, max_length=128)]


class Control(BaseModel):
    """The keys of the `control` JSON.

    Attributes:
        op: the operation.
        conversation: the conversation to act on. Default: the request's own.
        admin_token: the server's admin token, for ``drain``.
        timeout_s: for ``drain``: the seconds that running answers get to finish. Default: no limit.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    op: Literal["end", "status", "cancel", "ping", "flush", "drain"]
    conversation: _ConversationId | None = None
    admin_token: str | None = None
    timeout_s: Annotated[float, Field(ge=0)] | None = None


def read_control(inputs: Inputs) -> Control:
    """Read and check the `control` input.

    Raises:
        InvalidArgument: a key is unknown or wrong. The message names it and what it takes.
    """
    control = validate(Control, json_object("control", one(inputs, "control")), "control")
    for key in ("admin_token", "timeout_s"):
        if control.op != "drain" and getattr(control, key) is not None:
            raise InvalidArgument(key, f"is for drain only; {control.op} does not take it")
    return control


def act(
    control: Control, own: ConversationId, engine_thread: "EngineThread", kv_dtype: str, admin_token: str, sink: Sink
) -> None:
    """Carry out a control request, between two steps. The answer or the error goes to ``sink``.

    Args:
        control: the control request.
        own: the id of the request's own conversation, which is used if ``control`` names none.
        engine_thread: carries out the operation.
        kv_dtype: the dtype of the KV cache, for ``status``.
        admin_token: the setting ``admin_token``.
        sink: the request's sink.

    Raises:
        InvalidArgument: ``drain`` was sent without the right token.
    """
    conversation = own if control.conversation is None else control.conversation

    def reply(**result: object) -> None:
        sink(Delta(json.dumps({"op": control.op, "ok": True, **result}), (), FinishReason.STOP))

    def failed(error: RequestError) -> None:
        sink(Delta("", (), error=error))

    def on_conversation(turns: "TurnScheduler") -> None:
        if control.op == "cancel":
            turns.cancel_running(conversation)
            reply()
        elif control.op == "end":
            turns.manager.end(conversation, reply)
        else:
            reply(**dataclasses.asdict(turns.status(conversation)), dtype=kv_dtype, policy="full")

    if control.op == "ping":
        engine_thread.ping(lambda pulse: reply(**dataclasses.asdict(pulse)), failed)
    elif control.op == "flush":
        engine_thread.flush(lambda blocks: reply(blocks=blocks), failed)
    elif control.op == "drain":
        if not admin_token:
            raise InvalidArgument("admin_token", NO_TOKEN)
        if not admits(admin_token, control.admin_token or ""):
            raise InvalidArgument("admin_token", WRONG_TOKEN)
        timeout_s = float("inf") if control.timeout_s is None else control.timeout_s
        engine_thread.drain(timeout_s, lambda cut_short: reply(cut_short=cut_short), failed)
    else:
        engine_thread.with_turns(on_conversation, failed)
