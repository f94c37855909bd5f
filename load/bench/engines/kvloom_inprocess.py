"""kvloom's engine alone, without Triton."""

import os
import threading
import time
from importlib.metadata import version

from bench.engines.protocol import Prompts, serve
from kvloom.config import Settings
from kvloom.conversation.registry import only_turn
from kvloom.engine.build import build_engine
from kvloom.engine.thread import EngineThread
from kvloom.request import Delta, Request, SamplingParams


class InProcess:
    """The engine thread, and a thread that waits for it."""

    def __init__(self, model: str, settings: dict[str, str]):
        self.engine_thread = EngineThread(lambda: build_engine(Settings.parse({"model": model, **settings})).engine)
        self.versions = {name: version(name) for name in ("kvloom", "torch")}
        self.pid = os.getpid()

    def run(self, prompts: Prompts, new: int) -> list[list[int]]:
        """See ``Engine``."""
        left = threading.Semaphore(0)
        answers: list[list[int]] = [[] for _ in prompts]
        errors: list[Exception] = []
        params = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True)
        for answer, prompt in zip(answers, prompts, strict=True):

            def sink(delta: Delta, answer: list[int] = answer) -> None:
                answer.extend(delta.token_ids)
                if delta.error is not None:
                    errors.append(delta.error)
                if delta.final:
                    left.release()

            request = Request(id="", prompt_ids=tuple(prompt), params=params, arrival=time.monotonic())
            self.engine_thread.take_turn(only_turn(request, sink))
        for _ in prompts:
            left.acquire()
        if errors:
            raise errors[0]
        return answers

    def close(self) -> None:
        """See ``Engine``."""
        self.engine_thread.stop()


if __name__ == "__main__":
    serve(InProcess)
