"""The metrics that `llm` exports on tritonserver's /metrics, each declared once.

`make tables` writes them into the README's table. A test checks that Grafana's dashboard agrees with them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """A metric family: the metrics of one name.

    Attributes:
        name: its name in Prometheus.
        kind: its Prometheus type.
        about: one line for users, in Markdown.
        label: the name of its label. If it is empty, the family has no label and is one metric.
        figures: for each value of the label the source of the metric's value: a field of ``Stats``, or for a histogram
            a name in ``Observations``. Empty if no single field holds the value.
    """

    name: str
    kind: Literal["gauge", "counter", "histogram"]
    about: str
    label: str = ""
    figures: Mapping[str, str] = field(default_factory=dict)


FAMILIES = (
    Family("kvloom_requests_running", "gauge", "requests in the running batch", figures={"": "running"}),
    Family(
        "kvloom_requests_waiting",
        "gauge",
        "requests that wait to run, including preempted ones",
        figures={"": "waiting"},
    ),
    Family("kvloom_conversations", "gauge", "conversations that keep their cache", figures={"": "conversations"}),
    Family(
        "kvloom_blocks",
        "gauge",
        "blocks of the pool by state: `free`, `used` or `cached`, which add up to the pool; and `swapped` blocks in "
        "host memory",
        label="state",
        figures={
            "free": "blocks_free",
            "used": "blocks_used",
            "cached": "blocks_cached",
            "swapped": "blocks_swapped",
        },
    ),
    Family(
        "kvloom_prefix_tokens_queried_total",
        "counter",
        "prompt tokens that were looked up in the prefix cache",
        figures={"": "prefix_queried"},
    ),
    Family(
        "kvloom_prefix_tokens_hit_total",
        "counter",
        "prompt tokens that were found in the prefix cache",
        figures={"": "prefix_hit"},
    ),
    Family(
        "kvloom_preemptions_total",
        "counter",
        "sequences that were preempted, by `swap` or `recompute`",
        label="mode",
        figures={"swap": "swaps", "recompute": "recomputes"},
    ),
    Family(
        "kvloom_evicted_blocks_total",
        "counter",
        "blocks dropped by an eviction policy; `full` drops none",
        label="policy",
    ),
    Family(
        "kvloom_tokens_total",
        "counter",
        "`prompt` and `generated` tokens",
        label="kind",
        figures={"prompt": "prompt_tokens", "generated": "generated_tokens"},
    ),
    Family(
        "kvloom_requests_finished_total", "counter", "finished requests by finish reason or `error`", label="reason"
    ),
    Family("kvloom_ttft_seconds", "histogram", "time from arrival to the first token", figures={"": "ttft_seconds"}),
    Family(
        "kvloom_inter_token_seconds",
        "histogram",
        "time between two tokens of an answer",
        figures={"": "inter_token_seconds"},
    ),
    Family(
        "kvloom_e2e_seconds", "histogram", "time from arrival to the end of the answer", figures={"": "e2e_seconds"}
    ),
    Family("kvloom_queue_seconds", "histogram", "time from arrival to the first step", figures={"": "queue_seconds"}),
    Family("kvloom_step_seconds", "histogram", "duration of a step", figures={"": "step_seconds"}),
    Family("kvloom_step_tokens", "histogram", "tokens computed in a step", figures={"": "step_tokens"}),
    Family("kvloom_step_sequences", "histogram", "sequences in a step", figures={"": "step_sequences"}),
)
"""All metric families."""
