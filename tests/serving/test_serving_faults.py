"""Faults on the way between Triton and the engine: one final to each request, and nobody else notices.

Triton's Python backend is stood in for, so that it can fail on demand.
"""

import importlib
import json
import queue
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pytest

from kvloom.serving.cancel_watcher import CancelWatcher
from kvloom.serving.outbox import Senders
from support.waiting import wait_until

FINAL = 1


class TritonModelException(Exception):
    """A stand-in for Triton's."""


class Tensor:
    """A stand-in for ``pb_utils.Tensor``."""

    def __init__(self, name: str, value: np.ndarray):
        self._name, self._value = name, value

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._value


class Response:
    """A stand-in for ``pb_utils.InferenceResponse``."""

    def __init__(self, tensors: "list[Tensor] | tuple[()]" = (), error: str | None = None):
        self.texts = {tensor.name(): tensor.as_numpy()[0, 0].decode() for tensor in tensors}
        self.problem = error
        self._tensors = tensors

    def has_error(self) -> bool:
        return self.problem is not None

    def error(self) -> Any:
        return SimpleNamespace(message=lambda: self.problem)

    def output_tensors(self) -> "list[Tensor] | tuple[()]":
        return self._tensors


class Asked:
    """A request from a client, and what it gets: each response with whether it was marked as the final one."""

    def __init__(self, **inputs: str):
        self.got: queue.Queue[tuple[Response, bool]] = queue.Queue()
        self.left = False
        self.send = mock.Mock(side_effect=lambda response, flags: self.got.put((response, flags == FINAL)))
        self._inputs = [text(name, value) for name, value in inputs.items()]

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def parameters(self) -> str:
        return ""

    def request_id(self) -> str:
        return "asked"

    def get_response_sender(self) -> Any:
        return SimpleNamespace(send=self.send, is_cancelled=lambda: self.is_cancelled())

    def is_cancelled(self) -> bool:
        return self.left

    def end(self) -> str:
        """What the final response says; nothing follows it."""
        response, final = self.got.get(timeout=20)
        while not final:
            response, final = self.got.get(timeout=20)
        time.sleep(0.05)
        assert self.got.empty()
        return response.problem if response.problem is not None else response.texts["text_output"]


def text(name: str, value: str) -> Tensor:
    return Tensor(name, np.array([[value.encode()]], dtype=np.object_))


class Llm:
    """What answers the calls into `llm`: each with what ``script`` gives for its control op, or for None."""

    def __init__(self) -> None:
        self.ops: list[str | None] = []
        self.script: dict[str | None, Callable[[], Iterator[Response]]] = {}

    def request(self, **about: Any) -> Any:
        controls = [one.as_numpy()[0, 0] for one in about["inputs"] if one.name() == "control"]
        op = json.loads(controls[0])["op"] if controls else None

        def execute(decoupled: bool) -> Iterator[Response]:
            self.ops.append(op)
            return self.script[op]()

        return SimpleNamespace(exec=execute)


@pytest.fixture
def llm() -> Llm:
    return Llm()


@pytest.fixture
def serving(monkeypatch: pytest.MonkeyPatch, llm: Llm) -> Iterator[Any]:
    """The modules of `serving` that know Triton."""
    fake = SimpleNamespace(
        TritonModelException=TritonModelException,
        TritonError=str,
        Tensor=Tensor,
        InferenceResponse=Response,
        InferenceRequest=llm.request,
        TRITONSERVER_RESPONSE_COMPLETE_FINAL=FINAL,
    )
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", fake)
    names = ("sender", "stream", "self_calls", "generate")
    try:
        yield SimpleNamespace(**{name: importlib.import_module(f"kvloom.serving.{name}") for name in names})
    finally:
        for name in names:
            sys.modules.pop(f"kvloom.serving.{name}", None)


# to the client


def test_nothing_follows_the_final(serving):
    asked = Asked()
    sender = serving.sender.Sender(asked)
    sender.send([text("text_output", "all")], True)
    sender.fail("INTERNAL: too late")
    sender.send([text("text_output", "more")], False)
    assert asked.end() == "all"


@pytest.fixture
def watcher(serving: Any) -> Iterator[Any]:
    made = CancelWatcher()
    yield made
    made.stop()


@pytest.fixture
def outbox(serving: Any) -> Iterator[Any]:
    senders = Senders()
    yield senders.outbox()
    senders.stop()


@pytest.mark.parametrize("wrong", [ValueError("a fault"), TritonModelException("a fault")])
def test_an_answer_of_which_a_response_can_not_be_made_ends_and_is_not_worked_on(serving, watcher, outbox, wrong):
    asked, other, cancelled = Asked(), Asked(), threading.Event()
    sender, others = serving.sender.Sender(asked), serving.sender.Sender(other)
    watcher.watch(sender, cancelled.set)
    serving.stream.put(outbox, sender, mock.Mock(side_effect=wrong))
    serving.stream.put(outbox, sender, lambda: sender.send([text("text_output", "the rest")], True))
    serving.stream.put(outbox, others, lambda: others.send([text("text_output", "all")], True))
    assert asked.end() == "INTERNAL: a response could not be sent: a fault"
    assert other.end() == "all"
    assert cancelled.wait(20)


def test_a_broken_connection_keeps_no_other_answer_from_being_sent(serving, watcher, outbox):
    asked, other, cancelled = Asked(), Asked(), threading.Event()
    asked.send.side_effect = TritonModelException("broken")
    sender, others = serving.sender.Sender(asked), serving.sender.Sender(other)
    watcher.watch(sender, cancelled.set)
    serving.stream.put(outbox, sender, lambda: sender.send([text("text_output", "some")], False))
    serving.stream.put(outbox, others, lambda: others.send([text("text_output", "all")], True))
    assert other.end() == "all"
    assert cancelled.wait(20)


def test_the_watcher_hears_of_who_leaves_after_a_fault(serving, watcher):
    asked, cancelled = [Asked(), Asked()], threading.Event()
    watcher.watch(serving.sender.Sender(asked[0]), mock.Mock(side_effect=ValueError("a fault")))
    watcher.watch(serving.sender.Sender(asked[1]), cancelled.set)
    for one in asked:
        one.left = True
    assert cancelled.wait(20)


def test_who_is_given_up_while_it_is_looked_at_is_given_up(serving):
    asked = Asked()
    sender = serving.sender.Sender(asked)

    def given_up_meanwhile() -> bool:
        threading.Thread(target=sender.give_up, args=("INTERNAL: a fault",)).start()
        wait_until(lambda: sender.left)
        return False

    asked.is_cancelled = given_up_meanwhile
    assert sender.cancelled()
    assert asked.end() == "INTERNAL: a fault"


# from one model to the other


@pytest.fixture
def generate(serving: Any) -> Iterator[Any]:
    model = serving.generate.GenerateModel()
    model.initialize({"model_config": '{"parameters": {}}'})
    yield model
    model.finalize()


def part(what: str, reason: str = "") -> Response:
    return Response([text("text_output", what), text("finish_reason", reason)])


def said(what: str) -> Iterator[Response]:
    return iter([part(what, "stop")])


@pytest.mark.parametrize("broken", [Response([text("text_output", "b")]), None], ids=["response", "call"])
def test_a_fault_in_forwarding_ends_the_request_and_the_work_on_it(generate, llm, broken):
    def answer() -> Iterator[Response]:
        yield part("a")
        if broken is None:
            raise RuntimeError("a fault")
        yield broken
        yield part("c", "stop")

    llm.script = {None: answer, "cancel": lambda: said("")}
    asked = Asked(text_input="the")
    generate.execute([asked])
    assert asked.end().startswith("INTERNAL: forwarding failed: ")
    wait_until(lambda: llm.ops == [None, "cancel"])


def test_a_request_for_which_no_thread_begins_is_refused_alone(generate, llm, monkeypatch):
    llm.script = {None: lambda: said("all")}
    asked = [Asked(text_input="the"), Asked(text_input="the")]
    start = threading.Thread.start
    failing = [True]

    def begin(thread: threading.Thread) -> None:
        if failing:
            failing.clear()
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", begin)
    generate.execute(asked)
    assert asked[0].end() == "INTERNAL: the request could not be forwarded: can't start new thread"
    assert asked[1].end() == "all"


def test_a_refusal_that_does_not_arrive_holds_up_nobody(generate, llm):
    llm.script = {None: lambda: said("all")}
    refused, other = Asked(control="no JSON"), Asked(text_input="the")
    refused.send.side_effect = TritonModelException("broken")
    generate.execute([refused, other])
    assert other.end() == "all"


def test_a_cancel_is_repeated_after_one_that_was_a_fault(generate, llm, monkeypatch):
    over = threading.Event()

    def answer() -> Iterator[Response]:
        over.wait(20)
        yield from said("")

    def cancel() -> Iterator[Response]:
        if llm.ops.count("cancel") == 1:
            raise TritonModelException("a fault")
        over.set()
        return said("")

    llm.script = {None: answer, "cancel": cancel}
    asked = Asked(text_input="the")
    generate.execute([asked])
    asked.left = True
    assert asked.end() == ""
    assert llm.ops[:3] == [None, "cancel", "cancel"]


def test_the_link_goes_on_after_a_fault(serving, llm):
    def ping() -> Iterator[Response]:
        if len(llm.ops) == 1:
            raise RuntimeError("a fault")
        return said("{}")

    ended: list[int] = []
    llm.script = {"ping": ping}
    self_calls = serving.self_calls.SelfCalls("llm", "secret", ended.append)
    self_calls.end(1)
    self_calls.end(2)
    wait_until(lambda: sorted(ended) == [1, 2])
    self_calls.stop()


@pytest.mark.parametrize("taken_in", ["call", "pause"])
def test_the_link_does_not_end_again_what_a_client_has_started_meanwhile(serving, llm, monkeypatch, taken_in):
    self_calls = serving.self_calls.SelfCalls("llm", "secret", lambda conversation: None)
    wait = self_calls._stopping.wait

    def pause(seconds: float) -> bool:
        if taken_in == "pause":
            self_calls.taken(1)
        return wait(seconds)

    def ping() -> Iterator[Response]:
        if taken_in == "call":
            self_calls.taken(1)
        raise RuntimeError("a fault")

    monkeypatch.setattr(self_calls._stopping, "wait", pause)
    monkeypatch.setattr(serving.self_calls, "RETRY_S", 0.01)
    llm.script = {"ping": ping}
    self_calls.end(1)
    time.sleep(0.3)
    self_calls.stop()
    assert llm.ops == ["ping"]
