"""The inputs and outputs of kvloom's models, each declared once.

The parser and the responses use these rows. `make tables` writes them into every model's config.pbtxt and into the
README's tables. A test checks that the client's keywords agree with them.
"""

from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Literal

Type = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]
"""Triton's data types as config.pbtxt names them. Clients call STRING BYTES."""


class Part(Enum):
    """The purpose of an input."""

    PROMPT = auto()
    """A prompt or a control request. Every request has exactly one of these."""
    SAMPLING = auto()
    """A sampling key."""
    OPTION = auto()
    """A field of ``Options``."""
    JSON = auto()
    """A JSON object with several keys."""
    OUTPUT = auto()
    """Asks for an optional output."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the models' interface.

    Attributes:
        name: its name, for Triton and in the JSON of HTTP.
        type: the type of its elements.
        about: one line for users, in Markdown.
        many: whether it may have any number of elements; otherwise it has one.
    """

    name: str
    type: Type
    about: str
    _: KW_ONLY
    many: bool = False

    @property
    def dims(self) -> int:
        """Its dimension in config.pbtxt, which leaves out the batch dimension. -1 means any length."""
        return -1 if self.many else 1

    @property
    def shape(self) -> str:
        """Its shape in the README and in errors."""
        return "[1, n]" if self.many else "[1, 1]"


@dataclass(frozen=True, slots=True)
class Output(Tensor):
    """A tensor of a response.

    Attributes:
        always: whether every response has it. Otherwise a request asks for it by the input ``return_NAME``.
    """

    _: KW_ONLY
    always: bool = False


@dataclass(frozen=True, slots=True)
class Input(Tensor):
    """A tensor of a request. Every input is optional.

    Attributes:
        part: its purpose.
        key: the sampling key that it sets, or the output that it asks for.
    """

    _: KW_ONLY
    part: Part
    key: str = ""


OUTPUTS = (
    Output("text_output", "STRING", "the new text since the previous response", always=True),
    Output(
        "finish_reason",
        "STRING",
        "empty until the last response, then `stop`, `length`, `cancelled` or `deadline`",
    ),
    Output("num_input_tokens", "UINT32", "tokens of the prompt"),
    Output("num_output_tokens", "UINT32", "tokens generated since the previous response"),
    Output("logprobs", "STRING", "JSON list: `id`, `text`, `logprob` and `top` of each new token, from raw logits"),
    Output("cumulative_logprob", "FP32", "sum of the log probabilities of all tokens so far"),
    Output("token_ids", "INT32", "token ids since the previous response; the text may lag behind them", many=True),
    Output(
        "usage",
        "STRING",
        "JSON, only in the last response: `prompt_tokens`, `cached_tokens`, `generated_tokens`, `queue_ms`, "
        "`prefill_ms`, `decode_ms`, `blocks`, `preemptions` and more",
    ),
)
"""Every output of both models."""


def _sampling(name: str, type: Type, key: str = "", many: bool = False) -> Input:
    about = f"the sampling key `{key}`" if key else "the sampling key of that name"
    return Input(name, type, about, part=Part.SAMPLING, key=key or name, many=many)


def _returned(output: Output) -> Input:
    about = "asks for the output of that name"
    return Input(f"return_{output.name}", "BOOL", about, part=Part.OUTPUT, key=output.name)


INPUTS = (
    Input("text_input", "STRING", "the prompt as plain text; no chat template is applied", part=Part.PROMPT),
    Input(
        "messages",
        "STRING",
        "JSON list of chat messages with `role` and `content` (text, or a list of text parts; may be null beside "
        "`tool_calls`); the model's chat template is applied",
        part=Part.PROMPT,
    ),
    Input("input_ids", "INT32", "the prompt as token ids", part=Part.PROMPT, many=True),
    Input(
        "control",
        "STRING",
        'JSON `{"op": "ping"}`, and on `llm` also `status`, `cancel`, `end` (with `"conversation": id`), `flush` and '
        "`drain`",
        part=Part.PROMPT,
    ),
    Input(
        "stream",
        "BOOL",
        "true: responses as tokens come (default on `llm`); false: one response with the whole answer (default on "
        "`generate`)",
        part=Part.OPTION,
    ),
    Input("sampling_parameters", "STRING", "JSON of sampling keys", part=Part.JSON),
    _sampling("max_tokens", "INT32"),
    _sampling("min_tokens", "INT32"),
    _sampling("min_length", "INT32", key="min_tokens"),
    _sampling("temperature", "FP32"),
    _sampling("top_p", "FP32"),
    _sampling("top_k", "INT32"),
    _sampling("min_p", "FP32"),
    _sampling("repetition_penalty", "FP32"),
    _sampling("presence_penalty", "FP32"),
    _sampling("frequency_penalty", "FP32"),
    _sampling("length_penalty", "FP32"),
    _sampling("seed", "UINT64"),
    _sampling("random_seed", "UINT64", key="seed"),
    _sampling("beam_width", "INT32"),
    _sampling("stop_words", "STRING", key="stop", many=True),
    _sampling("bad_words", "STRING", many=True),
    Input(
        "exclude_input_in_output",
        "BOOL",
        "an answer to `text_input` that is not streamed begins with the prompt unless this is true",
        part=Part.OPTION,
    ),
    *(_returned(output) for output in OUTPUTS if not output.always),
    Input(
        "kv",
        "STRING",
        "JSON of options for the KV cache: `dtype` (`auto` or that of the setting `kv_dtype`), `policy` (`auto` or "
        "`full`) and `retain_s` (seconds for which the prompt stays in the prefix cache after the answer; -1 for "
        "ever); an option that this server's cache does not support is refused",
        part=Part.JSON,
    ),
    Input(
        "stream_interval_ms",
        "INT32",
        "minimum milliseconds between responses; 0, the default, sends every token; `generate` uses at least 50",
        part=Part.OPTION,
    ),
    Input(
        "priority", "INT32", "0 by default; the waiting request with the highest priority runs first", part=Part.OPTION
    ),
    Input(
        "deadline_ms",
        "INT32",
        "milliseconds from arrival; then the answer ends with the text so far and finish reason `deadline`",
        part=Part.OPTION,
    ),
    Input("cache_salt", "STRING", "only requests with the same salt share cached prefixes", part=Part.OPTION),
)
"""Every input of both models."""


def inputs_of(part: Part) -> tuple[Input, ...]:
    """All inputs with this purpose."""
    return tuple(declared for declared in INPUTS if declared.part is part)
