"""Responses on their way: each answer's in order, and none behind the rest of another."""

import threading
import time
from collections import defaultdict

from kvloom.serving.outbox import SENDERS, Senders


def test_each_answer_is_sent_in_order_and_wholly():
    senders = Senders()
    sent = defaultdict(list)
    outboxes = [senders.outbox() for _ in range(50)]

    def put(first: int) -> None:
        for number in range(first, first + 200):
            for answer, outbox in enumerate(outboxes):
                outbox.put(lambda answer=answer, number=number: sent[answer].append(number))

    put(0)
    other = threading.Thread(target=put, args=(200,))
    other.start()
    other.join()
    senders.stop()
    assert len(sent) == 50
    assert all(numbers == list(range(400)) for numbers in sent.values())


def test_an_answer_is_sent_by_one_thread_at_a_time():
    senders = Senders()
    outbox = senders.outbox()
    busy, met = threading.Lock(), []

    def send() -> None:
        met.append(busy.acquire(blocking=False))
        time.sleep(0.0005)
        busy.release()

    for _ in range(200):
        outbox.put(send)
    senders.stop()
    assert met == [True] * 200


def test_what_is_left_at_the_end_is_sent_without_delay():
    senders = Senders()
    outbox = senders.outbox()
    sent: list[int] = []
    for number in range(1000):
        outbox.put(lambda number=number: sent.append(number))
    began = time.monotonic()
    senders.stop()
    assert time.monotonic() - began < 10
    assert sent == list(range(1000))


def test_no_answer_waits_for_the_rest_of_others():
    senders = Senders()
    full = [senders.outbox() for _ in range(2 * SENDERS)]
    for outbox in full:
        for _ in range(100):
            outbox.put(lambda: time.sleep(0.01))
    sent = threading.Event()
    senders.outbox().put(sent.set)
    # one turn of each; the rest of one alone takes a second
    assert sent.wait(0.5)
    senders.stop()


def test_an_answer_that_begins_comes_before_the_others():
    senders = Senders()
    outboxes = [senders.outbox() for _ in range(20)]
    for outbox in outboxes:
        outbox.put(lambda: None)
    queued, done, sent = threading.Event(), threading.Event(), []
    # one thread is kept busy until all that follows is queued, the others until it has sent that
    senders.outbox().put(queued.wait)
    for _ in range(SENDERS - 1):
        senders.outbox().put(done.wait)
    for outbox in outboxes:
        outbox.put(lambda: sent.append("more"))
    for _ in range(3):
        senders.outbox().put(lambda: sent.append("first"))
    outboxes[-1].put(done.set)
    queued.set()
    senders.stop()
    assert sent == ["first"] * 3 + ["more"] * 20
