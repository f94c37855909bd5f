"""Answers of an engine in its thread, to be waited for."""

import threading
from collections.abc import Iterable

from kvloom.conversation.registry import only_turn
from kvloom.engine.thread import EngineThread
from kvloom.request import Delta, Request, SamplingParams
from support.engine_driver import Answer


def submit(engine_thread: EngineThread, prompt: Iterable[int], **params: object) -> tuple[Answer, threading.Event]:
    """Ask; the event is set when the answer is over."""
    answer, done = Answer(), threading.Event()

    def sink(delta: Delta) -> None:
        answer.append(delta)
        if delta.final:
            done.set()

    asked = SamplingParams.model_validate({"ignore_eos": True, **params})
    engine_thread.take_turn(only_turn(Request(id="", prompt_ids=tuple(prompt), params=asked, arrival=0.0), sink))
    return answer, done
