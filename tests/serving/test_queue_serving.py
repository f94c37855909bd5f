"""Priorities, limits of the queue, deadlines and cancels of what waits, as a server's users see them."""

import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import grpc
import pytest
from tritonclient.grpc import service_pb2_grpc

from kvloom.launcher.launch import Server
from kvloom_client import Answer, Client, RequestFailed, Unavailable, wire
from kvloom_client.answer import join
from kvloom_client.request import build_request
from support.server import metrics
from support.tiny_server import BLOCK, Tiny, request

CONTEXT = 65_536
"""So many tokens take the tiny model half a minute."""

BLOCKS = 2 * CONTEXT // BLOCK


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Tiny:
    return Tiny(tmp_path_factory.mktemp("tiny") / "model", CONTEXT)


@pytest.fixture(scope="module")
def one_slot(tiny) -> Iterator[Server]:
    """One request runs at a time, and the others wait for two seconds at most."""
    with tiny.serve(max_running=1, queue_timeout_ms=2000, kv_blocks=BLOCKS) as server:
        yield server


class Busy:
    """The one slot of a server is taken by a long answer."""

    def __init__(self, server: Server):
        self._server = server

    def __enter__(self) -> "Busy":
        self._client = Client(self._server.grpc_url)
        self.stream = self._client.stream(**request(30, max_tokens=CONTEXT - 200), cache_salt=uuid.uuid4().hex)
        next(self.stream)
        return self

    def __exit__(self, *_: object) -> None:
        self.stream.cancel()
        self._client.close()


def until_waiting(server: Server, count: int) -> None:
    deadline = time.monotonic() + 5
    while metrics(server)["kvloom_requests_waiting"] != count:
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.slow
def test_higher_priorities_run_first_and_equal_ones_in_order(tiny):
    order: list[int] = []
    # far apart: what waits gains a level every five seconds
    priorities = [0, 100, -300, 500, 100, 0]

    def one(number: int) -> None:
        # long answers in few messages: one's end is noted here before the next one's
        long = request(31 + number, max_tokens=2000, stream_interval_ms=1000)
        client.generate(**long, priority=priorities[number], timeout=60)
        order.append(number)

    with tiny.serve(max_running=1, kv_blocks=BLOCKS) as server, tiny.client(server) as client:
        with ThreadPoolExecutor(len(priorities)) as pool:
            with Busy(server):
                for number in range(len(priorities)):
                    pool.submit(one, number)
                    until_waiting(server, number + 1)
        assert order == [3, 1, 4, 0, 5, 2]


def timed(pool: ThreadPoolExecutor, act: Callable[[], Any]) -> Future[tuple[Any, float]]:
    """Run ``act`` in another thread; its result, or what it raised, and how many seconds it took."""

    def run() -> tuple[Any, float]:
        begun = time.monotonic()
        try:
            return act(), time.monotonic() - begun
        except RequestFailed as error:
            return error, time.monotonic() - begun

    return pool.submit(run)


def named(server: Server, conversation: str, **arguments: Any) -> Answer:
    """An answer whose conversation has a name, so that it can be cancelled by it."""
    message = wire.encode_request(build_request(stream=True, **arguments))
    message.parameters["sequence_id"].string_param = conversation
    with grpc.insecure_channel(server.grpc_url) as channel:
        replies = service_pb2_grpc.GRPCInferenceServiceStub(channel).ModelStreamInfer(iter((message,)), timeout=60)
        received = [wire.decode_response(reply) for reply in replies]
    assert [reply.final for reply in received] == [False] * (len(received) - 1) + [True]
    return join([reply.chunk for reply in received if reply.chunk is not None])


def test_what_waits_ends_on_time_though_a_long_answer_runs(tiny, one_slot):
    with tiny.client(one_slot) as client, ThreadPoolExecutor(3) as pool:
        with Busy(one_slot) as busy:
            overdue = timed(pool, lambda: client.generate(**request(40)))
            late = timed(pool, lambda: client.generate(**request(41), deadline_ms=700))
            cancelled = timed(pool, lambda: named(one_slot, "waiting", **request(42)))
            until_waiting(one_slot, 3)
            assert client.control("cancel", conversation="waiting")["ok"]
            answer, _ = cancelled.result()
            assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "cancelled")
            answer, seconds = late.result()
            assert (answer.text, answer.token_ids, answer.finish_reason) == ("", (), "deadline")
            assert seconds >= 0.7
            error, seconds = overdue.result()
            assert isinstance(error, Unavailable)
            assert error.text.startswith("UNAVAILABLE: queue_timeout_ms")
            assert seconds >= 2
            assert next(busy.stream).token_ids, "the long answer runs on"
