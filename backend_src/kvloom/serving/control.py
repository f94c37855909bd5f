"""The `control` input: acts on conversations and on the server, outside of any answer."""

import dataclasses
import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvloom.conversations import ConversationId
from kvloom.errors import RequestError
from kvloom.loop import Loop
from kvloom.request import Delta, FinishReason, Sink
from kvloom.serving.fields import Inputs, one
from kvloom.serving.sampling import json_object, validate
from kvloom.turns import Turns

PING = json.dumps({"op": "ping"})

_ConversationId = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1, max_length=128)]


class Control(BaseModel):
    """The keys of the `control` JSON.

    Attributes:
        op: what to do.
        conversation: to which conversation; the request's own where it is absent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Literal["end", "status", "cancel", "ping", "flush"]
    conversation: _ConversationId | None = None


def read_control(inputs: Inputs) -> Control:
    """Read and check the `control` input.

    Raises:
        InvalidArgument: naming the key and what it takes.
    """
    return validate(Control, json_object("control", one(inputs, "control")))


def answer(control: Control, **result: Any) -> str:
    """The text_output of a control that worked."""
    return json.dumps({"op": control.op, "ok": True, **result})


def act(control: Control, own: ConversationId, loop: Loop, kv_dtype: str, sink: Sink) -> None:
    """Do what a control request asks for, between two steps; its answer goes to ``sink``.

    Args:
        control: what to do.
        own: the request's own conversation, meant where the control names none.
        loop: whose thread does it.
        kv_dtype: dtype of the cache, for status.
        sink: of the request.
    """
    conversation = own if control.conversation is None else control.conversation

    def reply(**result: object) -> None:
        sink(Delta(answer(control, **result), (), FinishReason.STOP))

    def on_conversation(turns: Turns) -> None:
        try:
            if control.op == "cancel":
                turns.cancel_running(conversation)
                reply()
            elif control.op == "end":
                turns.end(conversation, reply)
            else:
                reply(**dataclasses.asdict(turns.status(conversation)), dtype=kv_dtype, policy="full")
        except RequestError as error:
            sink(Delta("", (), error=error))

    if control.op == "ping":
        loop.post(reply)
    elif control.op == "flush":
        loop.flush(lambda blocks: reply(blocks=blocks))
    else:
        loop.with_turns(on_conversation)
