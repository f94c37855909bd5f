"""The cases of the benchmark: the runs of each, and how a figure is computed from their times."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from bench.prompts import PromptSource


@dataclass(frozen=True)
class Scale:
    """The size of the cases.

    Attributes:
        streams: numbers of prompts that are answered at once.
        prompt: tokens of each prompt.
        new: tokens of each answer.
        prefills: lengths of the prompts of prefill cases, whose answers have one token.
        prefix: length of the common prefix of the prefix cases' prompts.
        suffix: tokens of each of these prompts after the prefix.
        sharing: number of prompts at once that share the prefix.
        short: how often a run of less than a second is repeated in a round.
        probes: how often each rate of the machine is measured at a time. The best counts.
        settled: whether to wait until an engine has settled after it has loaded.
    """

    streams: tuple[int, ...] = (1, 8, 32, 64)
    prompt: int = 128
    new: int = 64
    prefills: tuple[int, ...] = (512, 2048)
    prefix: int = 2000
    suffix: int = 32
    sharing: int = 32
    short: int = 3
    probes: int = 5
    settled: bool = True


FULL = Scale()
QUICK = Scale(
    streams=(1, 2),
    prompt=16,
    new=4,
    prefills=(32,),
    prefix=64,
    suffix=16,
    sharing=2,
    short=1,
    probes=1,
    settled=False,
)

SHORT_PREFILL = 1024
"""Prompts below it take less than a second."""


@dataclass(frozen=True)
class Run:
    """One measured call of an engine, with all prompts at once.

    Attributes:
        name: the key of its seconds. Repetitions have the same name and other prompts.
        kind: ``one``, ``all``, ``prefill``, ``cold``, ``warm`` or ``shared``.
        prompts: the token ids of each prompt.
        new: tokens of each answer.
    """

    name: str
    kind: str
    prompts: list[list[int]]
    new: int


@dataclass(frozen=True)
class Group:
    """Runs that belong together. An engine does all of them before the next engine's turn.

    Attributes:
        name: the group's name in the samples.
        streams: number of prompts at once.
        runs: the runs, in order.
    """

    name: str
    streams: int
    runs: tuple[Run, ...]


def rounds(scale: Scale, count: int, source: PromptSource) -> Iterator[list[Group]]:
    """The groups of each round. All engines get the same prompts, and no two runs do."""
    for _ in range(count):
        groups = []
        for streams in scale.streams:
            runs: list[Run] = []
            for _ in range(scale.short if streams == 1 else 1):
                runs.append(Run(f"one/{streams}", "one", source.take(streams, scale.prompt), 1))
                runs.append(Run(f"all/{streams}", "all", source.take(streams, scale.prompt), scale.new))
            groups.append(Group(f"batch/{streams}", streams, tuple(runs)))
        for length in scale.prefills:
            often = scale.short if length < SHORT_PREFILL else 1
            runs = [Run(f"prefill/{length}", "prefill", source.take(1, length), 1) for _ in range(often)]
            groups.append(Group(f"prefill/{length}", 1, tuple(runs)))
        (prefix,) = source.take(1, scale.prefix)
        cold, *others = [prefix + suffix for suffix in source.take(1 + scale.short + scale.sharing, scale.suffix)]
        runs = [Run("cold", "cold", [cold], 1)]
        runs += [Run("warm", "warm", [prompt], 1) for prompt in others[: scale.short]]
        runs.append(Run("shared", "shared", others[scale.short :], scale.new))
        groups.append(Group("prefix", 1, tuple(runs)))
        yield groups


@dataclass(frozen=True)
class Case:
    """A column of the table.

    Attributes:
        name: ``decode``, ``total``, ``prefill``, ``ttft_cold``, ``ttft_warm`` or ``shared``.
        size: prompts at once, or for ``prefill`` the prompt's length.
        unit: the unit of its figure.
    """

    name: str
    size: int
    unit: str = "tokens/s"

    @property
    def title(self) -> str:
        """The case's name in tables."""
        return f"{self.name.replace('_', ' ')} {self.size}"

    @property
    def group(self) -> str:
        """The group with the case's runs."""
        return {"decode": f"batch/{self.size}", "total": f"batch/{self.size}", "prefill": f"prefill/{self.size}"}.get(
            self.name, "prefix"
        )


def cases(scale: Scale) -> list[Case]:
    """All columns, in order."""
    return [
        *(Case("decode", streams) for streams in scale.streams),
        *(Case("total", streams) for streams in scale.streams),
        *(Case("prefill", length) for length in scale.prefills),
        Case("ttft_cold", scale.prefix, "ms"),
        Case("ttft_warm", scale.prefix, "ms"),
        Case("shared", scale.sharing),
    ]


def figure(case: Case, scale: Scale, samples: Mapping[str, Sequence[float]]) -> float | None:
    """The case's figure in one round, from the median seconds of its runs; None if they are missing.

    The time of decoding is the time of a whole answer minus the time of its first token. So it is comparable for all
    engines, even those that do not show when tokens come.
    """
    size = case.size
    seconds = {name: statistics.median(of) for name, of in samples.items()}
    match case.name:
        case "decode":
            one, whole = seconds.get(f"one/{size}"), seconds.get(f"all/{size}")
            # On a busy machine the whole answer may have been faster, if it has few tokens
            return size * (scale.new - 1) / (whole - one) if one and whole and whole > one else None
        case "total":
            return _rate(size * scale.new, seconds.get(f"all/{size}"))
        case "prefill":
            return _rate(size, seconds.get(f"prefill/{size}"))
        case "shared":
            return _rate(size * scale.new, seconds.get("shared"))
        case _:
            time = seconds.get(case.name.removeprefix("ttft_"))
            return None if time is None else 1000 * time


def _rate(tokens: int, seconds: float | None) -> float | None:
    return None if seconds is None else tokens / seconds
