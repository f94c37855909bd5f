"""The inputs and outputs of kvloom's models, each declared once.

The parser and the responses follow from these rows. So do every model's config.pbtxt and the README's tables, which
`make tables` writes. A test holds the client's keywords to them.
"""

from dataclasses import KW_ONLY, dataclass
from enum import Enum, auto
from typing import Literal

Type = Literal["STRING", "BOOL", "INT32", "UINT32", "UINT64", "FP32"]
"""Triton's name of a data type, as in config.pbtxt. Clients write BYTES for STRING."""


class Part(Enum):
    """What an input is for."""

    PROMPT = auto()
    """The prompt, or what to do instead of an answer. Every request has exactly one of these."""
    SAMPLING = auto()
    """One key of the sampling parameters."""
    OPTION = auto()
    """A field of ``Options``."""
    JSON = auto()
    """An object whose keys are checked one by one."""
    OUTPUT = auto()
    """Asks for one output."""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor as clients see it.

    Attributes:
        name: its name, for Triton and in the JSON of HTTP.
        type: of its elements.
        about: one line for users, in Markdown.
        many: it has any number of elements, not one.
    """

    name: str
    type: Type
    about: str
    _: KW_ONLY
    many: bool = False

    @property
    def dims(self) -> int:
        """Its shape in config.pbtxt, where the batch dimension is left out; -1 is any length."""
        return -1 if self.many else 1

    @property
    def shape(self) -> str:
        """Its shape as users read it."""
        return "[1, n]" if self.many else "[1, 1]"


@dataclass(frozen=True, slots=True)
class Output(Tensor):
    """A tensor of a response.

    Attributes:
        always: every response has it; the others are there where the input ``return_NAME`` asks for them.
    """

    _: KW_ONLY
    always: bool = False


@dataclass(frozen=True, slots=True)
class Input(Tensor):
    """A tensor of a request, which may leave it out.

    Attributes:
        part: what it is for.
        key: the sampling key that it sets, or the output that it asks for.
    """

    _: KW_ONLY
    part: Part
    key: str = ""


OUTPUTS = (
    Output("text_output", "STRING", "the text that became certain with this response", always=True),
    Output(
        "finish_reason",
        "STRING",
        "empty until the last response, then `stop`, `length`, `cancelled` or `deadline`",
    ),
    Output("num_input_tokens", "UINT32", "tokens of the prompt"),
    Output("num_output_tokens", "UINT32", "tokens generated since the last response"),
    Output("logprobs", "STRING", "JSON list: `id`, `text`, `logprob` and `top` of each new token, from the raw logits"),
    Output("cumulative_logprob", "FP32", "sum of the log probabilities of all tokens so far"),
    Output("token_ids", "INT32", "the tokens since the last response; text may lag behind them", many=True),
    Output(
        "usage",
        "STRING",
        "JSON, with the last response: `prompt_tokens`, `cached_tokens`, `generated_tokens`, `queue_ms`, `prefill_ms`, "
        "`decode_ms`, `blocks`, `preemptions` and more",
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
    Input("text_input", "STRING", "the prompt as it is", part=Part.PROMPT),
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
        "responses as tokens come (default on `llm`), or one whole answer (default on `generate`)",
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
        "a whole answer to `text_input` begins with the prompt unless this is true",
        part=Part.OPTION,
    ),
    *(_returned(output) for output in OUTPUTS if not output.always),
    Input(
        "kv",
        "STRING",
        "JSON about the cache: `dtype` (`auto` or that of the setting `kv_dtype`), `policy` (`auto` or `full`) and "
        "`retain_s` (seconds for which the prompt stays in the cache); what this server's cache can't do is refused "
        "by name",
        part=Part.JSON,
    ),
    Input(
        "stream_interval_ms",
        "INT32",
        "least time between responses; 0, the default, is every token; `generate` waits at least 50",
        part=Part.OPTION,
    ),
    Input("priority", "INT32", "0 by default; of the waiting requests the highest runs first", part=Part.OPTION),
    Input(
        "deadline_ms",
        "INT32",
        "then the answer so far is the answer, with finish reason `deadline`",
        part=Part.OPTION,
    ),
    Input("cache_salt", "STRING", "only requests of the same salt share cached prefixes", part=Part.OPTION),
)
"""Every input of both models."""


def inputs_of(part: Part) -> tuple[Input, ...]:
    """The inputs that are for one thing."""
    return tuple(declared for declared in INPUTS if declared.part is part)
