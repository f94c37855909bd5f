"""An engine in its thread, and sinks for its answers."""

import threading
import time

from kvloom.conversation.registry import Turn
from kvloom.engine.thread import EngineThread
from kvloom.request import Delta, FinishReason, Request, SamplingParams, Sequence
from kvloom.serving.control import Control, act
from support.engine_driver import Answer
from support.talks import Talks


class Heard(Answer):
    """A sink that a test can wait for."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.ended = threading.Event()

    def sequence(self, max_tokens: int, prompt: tuple[int, ...] = (5, 6), deadline: float | None = None) -> Sequence:
        params = SamplingParams(ignore_eos=True, temperature=0.0, max_tokens=max_tokens)
        request = Request(id="", prompt_ids=prompt, params=params, arrival=time.monotonic(), deadline=deadline)
        self.asked = Sequence(request)
        return self.asked

    def __call__(self, delta: Delta) -> None:
        self.append(delta)
        self.begun.set()
        if delta.final:
            self.ended.set()

    def wait(self) -> "Heard":
        assert self.ended.wait(60), "no final came"
        self.assert_one_final()
        return self


class Running:
    """An engine in its thread, with one running answer that must not be affected."""

    def __init__(self, talks: Talks):
        self.talks = talks
        self.engine = talks.engine
        self.engine_thread = EngineThread(lambda: self.engine)
        self.neighbour = self.say(1, max_tokens=4000, start=True)
        assert self.neighbour.begun.wait(60)

    def say(self, conversation: int, max_tokens: int = 4, **flags: bool) -> Heard:
        heard = Heard()
        self.engine_thread.take_turn(Turn(conversation, heard.sequence(max_tokens), heard, **flags))
        return heard

    def chat(
        self, conversation: int, text: str, max_tokens: int = 4, start: bool = False, deadline: float | None = None
    ) -> Heard:
        """Send a turn with a message."""
        heard, messages = Heard(), [{"role": "user", "content": text}]
        tokenizer = self.talks.tokenizer
        rendered, ids = "", ()
        if start:
            chat = tokenizer.render_chat(messages)
            rendered, ids = chat.text, tuple(tokenizer.encode_rendered(chat))
        sequence = heard.sequence(max_tokens, ids, deadline)
        self.engine_thread.take_turn(Turn(conversation, sequence, heard, start, messages=messages, rendered=rendered))
        return heard

    def control(self, op: str, conversation: int = 1, **keys: object) -> Heard:
        heard = Heard()
        act(Control(op=op, **keys), conversation, self.engine_thread, "fp32", "secret", heard)
        return heard

    def others_did_not_notice(self) -> None:
        self.engine_thread.cancel(self.neighbour.asked)
        assert self.neighbour.wait().reason is FinishReason.CANCELLED
        assert self.say(1).wait().reason is FinishReason.LENGTH
