"""The output of ``kvloom plan``: a server's memory with every cache dtype, as a table or as plain values."""

from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group
from rich.table import Table

from kvloom.config import Settings
from kvloom.errors import SettingsError
from kvloom.models.spec import ModelSpec
from kvloom.planning.dtypes import CODECS, cache_name
from kvloom.planning.memory import size_text
from kvloom.planning.plan import MemoryPlan, plan_memory

LENGTHS = (512, 2048, 8192, 32768, 131072)
"""Sequence lengths to show, as far as the context allows. The context length comes last."""

POLICY = "full"
"""The only cache policy: no block of a sequence is dropped."""


@dataclass(frozen=True, slots=True)
class PlanReport:
    """Memory plans for each cache dtype.

    Attributes:
        model: path of the model.
        served: the plan for the given settings.
        plans: by cache dtype: its plan, or the reason why there is none. ``served`` is one of them.
        lengths: sequence lengths to show, in tokens.
    """

    model: str
    served: MemoryPlan
    plans: dict[str, MemoryPlan | SettingsError]
    lengths: tuple[int, ...]

    def values(self) -> dict[str, Any]:
        """The report for programs. Sizes are in bytes."""
        return {
            "model": self.model,
            "kv_dtype": self.served.kv_dtype,
            "caches": [
                {"kv_dtype": name, "policy": POLICY, "error": str(plan)}
                if isinstance(plan, SettingsError)
                else {
                    "policy": POLICY,
                    **asdict(plan),
                    "token_bytes": plan.token_bytes,
                    "pool": plan.pool,
                    "swap": plan.swap,
                    "left": plan.left,
                    "sequences": {str(length): plan.sequences(length) for length in self.lengths},
                }
                for name, plan in self.plans.items()
            ],
        }

    def print(self, console: Console) -> None:
        """Print the report for people."""
        console.print(self.model, soft_wrap=True)
        console.print(Group(self._memory(), "", self._caches()))
        if self.served.left < 0:
            console.print(f"Too large: all blocks in use need {size_text(-self.served.left)} more than is free.")

    def _memory(self) -> Table:
        plan = self.served
        table = Table(show_header=False)
        table.add_column()
        table.add_column(justify="right")
        table.add_row("free memory" if plan.host_free is None else "free memory of the GPU", size_text(plan.free))
        table.add_row(f"weights ({plan.weights_dtype})", size_text(plan.weights))
        if plan.products:
            products = "compiled products, in time" if plan.host_free is None else "CUDA graphs"
            table.add_row(products, size_text(plan.products))
        table.add_row("a step's tensors, at most", size_text(plan.step))
        table.add_row(f"block pool ({plan.blocks:,} blocks)", size_text(plan.pool))
        where = "" if plan.host_free is None else f" of the host's {size_text(plan.host_free)}"
        table.add_row(f"swap pool ({plan.swap_blocks:,} blocks)", size_text(plan.swap) + where)
        table.add_row(
            f"left (headroom: {size_text(plan.headroom)})", size_text(plan.left) if plan.left >= 0 else "none"
        )
        return table

    def _caches(self) -> Table:
        table = Table(
            title="the cache, and how many sequences of each length it holds",
            title_justify="left",
            caption=f"* with these settings; at most {self.served.max_running:,} sequences run at a time",
            caption_justify="left",
        )
        for name in ("cache", "policy"):
            table.add_column(name, no_wrap=True)
        for name in ("per token", "per block", "blocks", *(f"{length:,}" for length in self.lengths)):
            table.add_column(name, justify="right", no_wrap=True)
        reasons = []
        for name, plan in self.plans.items():
            if isinstance(plan, SettingsError):
                reasons.append(f"{name}: {plan}")
                table.add_row(name, POLICY, *["-"] * (3 + len(self.lengths)))
                continue
            table.add_row(
                f"{name} *" if plan == self.served else name,
                POLICY,
                size_text(plan.token_bytes),
                size_text(plan.block_bytes),
                f"{plan.blocks:,}",
                *(f"{plan.sequences(length):,}" for length in self.lengths),
            )
        table.caption = "\n".join([str(table.caption), *reasons])
        return table


def report(
    model: str,
    spec: ModelSpec,
    settings: Settings,
    free: int,
    lengths: tuple[int, ...] = (),
    host_free: int | None = None,
) -> PlanReport:
    """Plan memory for the given settings and for every other cache dtype.

    Args:
        model: the model's path, to be shown.
        spec: the model's shape.
        settings: the server's settings, with the device chosen.
        free: free bytes on the model's device.
        lengths: sequence lengths to show; by default some usual ones and the context length.
        host_free: see ``plan_memory``.

    Raises:
        SettingsError: the settings do not fit the model or the memory, or a length exceeds the context.
    """
    served = plan_memory(spec, settings, free, host_free)
    context = served.context_length
    if lengths and max(lengths) > context:
        raise SettingsError(f"--length {max(lengths)}: the longest sequence has context_length={context} tokens")
    plans: dict[str, MemoryPlan | SettingsError] = {}
    for name in CODECS:
        try:
            plans[name] = plan_memory(spec, _with_cache(settings, name), free, host_free)
        except SettingsError as error:
            plans[name] = error
    usual = (*(length for length in LENGTHS if length < context), context)
    return PlanReport(model, served, plans, tuple(sorted(set(lengths))) or usual)


def _with_cache(settings: Settings, name: str) -> Settings:
    if name == cache_name(settings):
        return settings
    return Settings.parse({key: str(value) for key, value in settings.model_dump().items()} | {"kv_dtype": name})
