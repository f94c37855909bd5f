"""The metrics that `llm` shows on tritonserver's /metrics, each declared once.

The README's table follows from these rows (`make tables`); a test holds Grafana's dashboard to them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class Family:
    """Metrics of one name.

    Attributes:
        name: as Prometheus sees it.
        kind: what its values are.
        about: one line for users, in Markdown.
        label: name of its label; empty: it has none, and is one metric.
        figures: by value of the label: the field of ``Stats`` that is shown, or what ``Observations`` calls the
            observed. Empty where no single field has it.
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
        "requests that wait for their turn, preempted ones included",
        figures={"": "waiting"},
    ),
    Family("kvloom_conversations", "gauge", "conversations that keep their cache", figures={"": "conversations"}),
    Family(
        "kvloom_blocks",
        "gauge",
        "`free`, `used` and `cached` blocks of the pool, together all of it, and `swapped` ones in host memory",
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
        "prompt tokens that were looked for in the prefix cache",
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
        "sequences that gave their blocks away, by `swap` or `recompute`",
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
    Family("kvloom_requests_finished_total", "counter", "ended requests by finish reason, or `error`", label="reason"),
    Family("kvloom_ttft_seconds", "histogram", "from arrival to the first token", figures={"": "ttft_seconds"}),
    Family(
        "kvloom_inter_token_seconds",
        "histogram",
        "between two tokens of an answer",
        figures={"": "inter_token_seconds"},
    ),
    Family("kvloom_e2e_seconds", "histogram", "from arrival to the end of the answer", figures={"": "e2e_seconds"}),
    Family("kvloom_queue_seconds", "histogram", "from arrival to the first step", figures={"": "queue_seconds"}),
    Family("kvloom_step_seconds", "histogram", "time of a step", figures={"": "step_seconds"}),
    Family("kvloom_step_tokens", "histogram", "tokens computed in a step", figures={"": "step_tokens"}),
    Family("kvloom_step_sequences", "histogram", "sequences in a step", figures={"": "step_sequences"}),
)
"""Every family."""
