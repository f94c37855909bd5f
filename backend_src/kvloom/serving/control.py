"""The `control` input: acts on conversations and on the server, outside of any answer."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from kvloom.serving.fields import Inputs, one
from kvloom.serving.sampling import json_object, validate

PING = json.dumps({"op": "ping"})

ConversationId = Annotated[int, Field(ge=1)] | Annotated[str, Field(min_length=1, max_length=128)]


class Control(BaseModel):
    """The keys of the `control` JSON.

    Attributes:
        op: what to do.
        conversation: to which conversation; the request's own where it is absent.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    op: Literal["end", "status", "cancel", "ping", "flush"]
    conversation: ConversationId | None = None


def read_control(inputs: Inputs) -> Control:
    """Read and check the `control` input.

    Raises:
        InvalidArgument: naming the key and what it takes.
    """
    return validate(Control, json_object("control", one(inputs, "control")))


def answer(control: Control, **result: Any) -> str:
    """The text_output of a control that worked."""
    return json.dumps({"op": control.op, "ok": True, **result})
