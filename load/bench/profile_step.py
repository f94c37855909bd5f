"""Measures the time of each part of a decode step: runs the engine in-process with a clock around every op.

The ops are timed in steps that are computed op by op. When serving, a step replays a recording of them.

An op's floor is the minimum time to read its weights or its keys and values from memory, or to multiply. Data that is
still in the last-level cache from the previous step is read faster.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

from bench.floors import Floors, Machine
from bench.prompts import PromptSource
from bench.variants import IN_PROCESS
from kvloom.config import Settings
from kvloom.conversation.registry import only_turn
from kvloom.engine.build import build_engine
from kvloom.engine.engine import Engine
from kvloom.engine.thread import EngineThread
from kvloom.executor import decode_steps, runner
from kvloom.models import decoder
from kvloom.models.spec import ModelSpec
from kvloom.request import Delta, Request, SamplingParams, Slice

PROMPT, NEW = 128, 64
"""Tokens of each prompt and of each answer."""

OPS = ("add_rms_norm", "rope_kv_write", "paged_attention")
STEP, MODEL, BATCH, SAMPLING = "whole step", "model", "batch tensors", "sampling"
REPLAYED = "whole step, replayed"
MODEL_REST, STEP_REST = "between the ops", "scheduler, commit, text"


@dataclass
class Clock:
    """The total seconds of each op over the measured steps.

    Attributes:
        seconds: seconds by op.
        steps: number of measured steps.
        on: whether the current step is measured.
    """

    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    steps: int = 0
    on: bool = False

    def around(self, name: str, what: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function to time its calls."""

        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = what(*arguments, **options)
            if self.on:
                self.seconds[name] += time.perf_counter() - begin
            return result

        return timed


@dataclass(frozen=True)
class Profile:
    """The times of steps with one token for each of ``streams`` sequences: computed op by op, and replayed."""

    streams: int
    by_op: Clock
    replayed: Clock


def profile(settings: Settings, streams: Sequence[int], say: Callable[[str], None]) -> list[Profile]:
    """Time the steps of each number of streams. ``say`` gets progress messages."""
    source = PromptSource.default()
    profiles = []
    for count in streams:
        by_op, replayed = Clock(), Clock()
        for engine, clock, how in ((_timed_by_op, by_op, "op by op"), (_timed, replayed, "replayed")):
            say(f"steps of {count} stream{'s' if count > 1 else ''}, {how}")
            with ExitStack() as patches:
                engine_thread = EngineThread(partial(engine, settings, clock, count, patches))
                for _ in range(2):  # the first time is a warm-up
                    clock.seconds.clear()
                    clock.steps = 0
                    _answer(engine_thread, source.take(count, PROMPT))
                engine_thread.stop()
        profiles.append(Profile(count, by_op, replayed))
    return profiles


def rows(profiles: Sequence[Profile], spec: ModelSpec, machine: Machine, settings: Settings) -> list[dict[str, Any]]:
    """A row for each op and number of streams: milliseconds per step, share of the step, floor."""
    return [row for one in profiles for row in _rows(one, spec, machine, settings)]


def _timed(settings: Settings, clock: Clock, streams: int, patches: ExitStack, *, record: bool = True) -> Engine:
    """An engine that times its steps with one token for each of ``streams`` sequences."""
    engine = build_engine(settings, record=record).engine
    decodes, step = engine._runner._decodes, engine.step
    assert decodes is not None, "only CPUs can be profiled"
    inputs = decodes._inputs
    fill = clock.around(BATCH, inputs.fill)

    def begin(slices: Sequence[Slice]) -> None:
        clock.on = len(slices) == streams
        fill(slices)

    def whole() -> None:
        began = time.perf_counter()
        clock.on = False
        step()
        if clock.on:
            clock.seconds[STEP] += time.perf_counter() - began
            clock.steps += 1

    patches.enter_context(patch.object(inputs, "fill", begin))
    patches.enter_context(patch.object(engine, "step", whole))
    return engine


def _timed_by_op(settings: Settings, clock: Clock, streams: int, patches: ExitStack) -> Engine:
    """An engine that times these steps and all their ops."""
    engine = _timed(settings, clock, streams, patches, record=False)
    model: decoder.Decoder = engine._runner._decoder
    for layer in model._layers:
        for name, op in vars(layer).items():
            if callable(op):
                setattr(layer, name, clock.around(name, op))
    model._head = clock.around("head", model._head)
    for name in OPS:
        patches.enter_context(patch.object(decoder, name, clock.around(name, getattr(decoder, name))))
    for module, name in ((runner, "choose"), (decode_steps, "argmax")):
        patches.enter_context(patch.object(module, name, clock.around(SAMPLING, getattr(module, name))))
    patches.enter_context(patch.object(model, "forward", clock.around(MODEL, model.forward)))
    return engine


def _answer(engine_thread: EngineThread, prompts: list[list[int]]) -> None:
    left = threading.Semaphore(0)

    def sink(delta: Delta) -> None:
        if delta.final:
            assert delta.error is None, delta.error
            left.release()

    params = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)
    for prompt in prompts:
        request = Request(id="", prompt_ids=tuple(prompt), params=params, arrival=time.monotonic())
        engine_thread.take_turn(only_turn(request, sink))
    for _ in prompts:
        left.acquire()


def _rows(one: Profile, spec: ModelSpec, machine: Machine, settings: Settings) -> list[dict[str, Any]]:
    clock, replayed = one.by_op, one.replayed
    assert clock.steps and replayed.steps, "no step gave every stream a token"
    ms = {name: 1000 * seconds / clock.steps for name, seconds in clock.seconds.items()}
    around = (STEP, MODEL, BATCH, SAMPLING)
    inside = sum(time for name, time in ms.items() if name not in around)
    ms[MODEL_REST] = ms[MODEL] - inside
    ms[STEP_REST] = ms[STEP] - ms[MODEL] - ms[BATCH] - ms[SAMPLING]
    ms[REPLAYED] = 1000 * replayed.seconds[STEP] / replayed.steps
    floors = _floors(one.streams, spec, machine, settings)
    return [
        {
            "streams": one.streams,
            "op": name,
            "ms": round(time, 3),
            "share": round(time / ms[STEP], 4),
            "floor_ms": round(floors[name], 3) if name in floors else None,
        }
        for name, time in sorted(ms.items(), key=lambda item: (item[0] == REPLAYED, item[0] == STEP, -item[1]))
        if name != MODEL
    ]


def _floors(streams: int, spec: ModelSpec, machine: Machine, settings: Settings) -> dict[str, float]:
    """The floors in milliseconds of a step's ops that read from memory. The others read from the caches."""
    floors = Floors(machine, spec, IN_PROCESS[settings.weights])
    hidden, mlp, layers = spec.hidden_size, spec.intermediate_size, spec.n_layers
    q, kv = spec.n_heads * spec.head_dim, spec.n_kv_heads * spec.head_dim
    context = PROMPT + NEW / 2
    weights = {
        "qkv": layers * hidden * (q + 2 * kv),
        "attention_out": layers * hidden * q,
        "gate_up": layers * hidden * 2 * mlp,
        "down": layers * hidden * mlp,
    }
    seconds = {name: floors.product(streams, count) for name, count in weights.items()}
    seconds["head"] = floors.product(streams, spec.vocab_size * hidden, head=True)
    seconds["paged_attention"] = floors.attention(streams * context, streams * context)
    seconds[STEP] = seconds[REPLAYED] = floors.decode(streams, context)
    return {name: 1000 * time for name, time in seconds.items()}
