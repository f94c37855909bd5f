"""Waits for other threads: for a condition, or for the answer of an engine in its thread."""

import threading
import time
from collections.abc import Callable, Iterable

from kvloom.conversation.registry import only_turn
from kvloom.engine.thread import EngineThread
from kvloom.request import Delta, Request, SamplingParams
from support.engine_driver import Answer


def submit(engine_thread: EngineThread, prompt: Iterable[int], **params: object) -> tuple[Answer, threading.Event]:
    """Submit a request. The event is set when its answer has ended."""
    answer, done = Answer(), threading.Event()

    def sink(delta: Delta) -> None:
        answer.append(delta)
        if delta.final:
            done.set()

    asked = SamplingParams.model_validate({"ignore_eos": True, **params})
    engine_thread.take_turn(only_turn(Request(id="", prompt_ids=tuple(prompt), params=asked, arrival=0.0), sink))
    return answer, done


def wait_until(true: Callable[[], object], within: float = 60.0) -> None:
    """Poll quickly until ``true()`` holds, for at most ``within`` seconds."""
    deadline = time.monotonic() + within
    while not true():
        assert time.monotonic() < deadline, f"not within {within} s"
        time.sleep(0.005)
