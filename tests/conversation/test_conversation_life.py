"""Turns in whatever order: each is fed the history of its conversation, reads its own content only, and ends once."""

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, rule

from kvloom.conversation import turn_scheduler
from kvloom.conversation.manager import ConversationManager
from kvloom.conversation.registry import ConversationRegistry, Turn
from kvloom.conversation.turn_scheduler import TurnScheduler
from kvloom.errors import Internal, InvalidArgument, NotFound, Unavailable
from kvloom.request import Delta, FinishReason, Request, Sampled, SamplingParams, Sequence
from support.block_rig import ALWAYS_SWAP, BLOCK, NEVER_SWAP, Rig
from support.engine_driver import Answer
from support.life import LifeMachine, live
from support.talks import Triton

NAMES = [1, 2, 3, "1", "2"]
IDS = st.sampled_from(NAMES)
TOKENS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=2 * BLOCK)
LENGTHS = st.sampled_from([3, 9, 1, 20])
IDLE_S = 20.0


class TurnEngine(Rig):
    """An engine whose memory is simulated, as turns see it."""

    def __init__(self, max_conversations: int, **sizes: object):
        super().__init__(**sizes)
        self.triton = Triton()
        self.registry = ConversationRegistry(max_conversations, IDLE_S)
        manager = ConversationManager(self.scheduler, self.registry, self.triton, None, self.post)
        self.turns = TurnScheduler(self, self.scheduler, None, 10_000, manager)
        self.full = False
        self._sinks: dict[Sequence, object] = {}
        self._failing = False

    def post(self, *calls):
        for call in calls:
            call()

    def check_prompt(self, ids: list[int]) -> None:
        if self.too_long(ids):
            raise InvalidArgument("prompt", "too long")

    def too_long(self, ids: list[int]) -> bool:
        return len(ids) >= self.cache.total * BLOCK

    def refusal(self, turn):
        return Unavailable("full") if self.full else None

    def await_deadline(self, sequence):
        pass

    def begin(self, sequence, sink, held, since):
        self._sinks[sequence] = sink
        self._contents[sequence] = []
        self.alive.append(sequence)
        self.scheduler.add(sequence, held)

    def end(self, sequence, reason=None, error=None):
        self.alive.remove(sequence)
        del self._contents[sequence]
        conversation = self.turns.settle(sequence, error)
        said = tuple(Sampled(token) for token in sequence.tokens[len(sequence.request.prompt_ids) :])
        self._sinks.pop(sequence)(Delta("", () if error else said, reason, error))
        self.turns.proceed(conversation)

    def answer_unbegun(self, sequence, sink, reason=None, error=None):
        sink(Delta("", (), reason, error))

    def remove(self, sequence):
        if self._failing:
            self.end(sequence, error=Internal("the step failed"))
        else:
            self.end(sequence, FinishReason.LENGTH)

    def failing_step(self):
        self._failing = True
        try:
            return super().failing_step()
        finally:
            self._failing = False


class Life(LifeMachine):
    """Conversations that share beginnings, on a pool that is too small for them."""

    @initialize(
        blocks=st.sampled_from([8, 12, 20]),
        host=st.sampled_from([20, 4, 0]),
        costs=st.sampled_from([ALWAYS_SWAP, ALWAYS_SWAP, NEVER_SWAP]),
        max_running=st.sampled_from([6, 2]),
        max_batch_tokens=st.sampled_from([40, 6]),
        share=st.sampled_from([True, True, False]),
        max_conversations=st.sampled_from([4, 2]),
    )
    def build(self, **sizes):
        self.begin(turn_scheduler)
        self.rig = TurnEngine(**sizes)
        # what was sent to each conversation that lives or ended with an end, in order
        self.sent: dict[object, list[Answer]] = {}
        self.everything: list[Answer] = []

    @rule(name=IDS, ids=TOKENS, length=LENGTHS, end=st.sampled_from([False] * 5 + [True]))
    def start(self, name, ids, end, length):
        # on a live id less often than chance has it: much is lost with it
        names = [other for other in NAMES if self.rig.registry.get(other) is None]
        self.send(names[0] if names and length != 1 else name, ids, length, True, end)

    @rule(turns=st.lists(st.tuples(st.integers(0, 7), TOKENS, LENGTHS, st.sampled_from([30, 0, 2])), min_size=1))
    def turn(self, turns):
        """Mostly of conversations that there are; each runs to its end before the next, or does not."""
        for number, ids, length, steps in turns:
            names = [conversation.id for conversation in self.rig.registry] or NAMES
            self.send(names[number % len(names)], ids, length, False, False)
            self.step(steps)

    @rule(name=IDS, ids=TOKENS, length=LENGTHS)
    def last(self, name, ids, length):
        self.send(name, ids, length, False, True)

    def send(self, name, ids, length, start, end):
        request = Request(
            id="", prompt_ids=tuple(ids), params=SamplingParams(seed=0, max_tokens=length), arrival=self.clock.now
        )
        answer = Answer()
        answer.sequence, answer.new, answer.length = Sequence(request), ids, length
        live = self.rig.registry.get(name)
        before = {conversation: conversation.last_used for conversation in self.rig.registry._idle}
        open_before = live is not None and not live.ending
        self.rig.turns.submit(Turn(name, answer.sequence, answer.append, start, end, kv={} if start else None))
        self.everything.append(answer)
        conversation = self.rig.registry.get(name)
        if answer and isinstance(answer.error, Unavailable | NotFound):
            # refused: what was there is as before
            assert self.rig.full or start or not open_before
            assert end or conversation is live
            return
        gone = [old for old in before if self.rig.registry.get(old.id) is not old and old.id != name]
        assert len(gone) <= 1
        for old in gone:
            assert start
            assert before[old] == min(before.values()), "it was not the one that was used longest ago"
            assert ("end", old.id) not in self.rig.triton.told[-1:]
        if start:
            self.sent[conversation or answer] = [answer]
            answer.conversation = conversation
        else:
            assert open_before
            self.sent[live].append(answer)

    @rule(steps=st.sampled_from([1, 3, 20]))
    def step(self, steps):
        for _ in range(steps):
            if not self.rig.alive:
                break
            assert self.rig.step().slices, "nobody goes on"
            for sequence in [s for s in self.rig.alive if s.generated >= s.request.params.max_tokens]:
                self.rig.end(sequence, FinishReason.LENGTH)

    @rule(data=st.data(), name=IDS, how=st.sampled_from(["fail", "cancel", "cancel", "leave", "leave", "end", "full"]))
    def disturb(self, data, name, how):
        conversation = self.rig.registry.get(name)
        if how == "fail":
            self.rig.failing_step()
        elif how == "cancel" and conversation is not None:
            running = conversation.running
            self.rig.turns.cancel_running(name)
            assert conversation.running is not running or running is None
        elif how == "leave" and self.rig.turns._queued:
            self.rig.turns.cancel(data.draw(st.sampled_from(list(self.rig.turns._queued))))
        elif how == "full":
            self.rig.full = True
            self.send(name, [1], 1, data.draw(st.booleans()), False)
            self.rig.full = False
        elif how == "end":
            self.control_end(name, conversation)

    def control_end(self, name, conversation):
        ended = []
        if conversation is None:
            with pytest.raises(NotFound):
                self.rig.turns.manager.end(name, lambda: None)
        else:
            busy = conversation.busy
            self.rig.turns.manager.end(name, lambda: ended.append(name))
            assert bool(ended) != busy

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0, 30.0]))
    def wait(self, seconds):
        self.clock.now += seconds
        idle = {conversation: conversation.last_used for conversation in self.rig.registry._idle}
        self.rig.turns.manager.expire(self.clock.now)
        for conversation, last_used in idle.items():
            gone = self.rig.registry.get(conversation.id) is not conversation
            assert gone == (last_used + IDLE_S <= self.clock.now)

    @invariant()
    def turns_are_accounted_for(self):
        if self.rig is not None:
            self.rig.turns.check()

    @invariant()
    def each_turn_was_fed_the_history_before_it(self):
        if self.rig is None:
            return
        for answers in self.sent.values():
            history: list[int] = []
            for answer in answers:
                if not answer:
                    break
                answer.assert_one_final()
                if answer.error is not None:
                    continue
                if not answer.ids and self.rig.too_long([*history, *answer.new]):
                    # its client left while it waited, and when its turn came it could not be fed
                    continue
                if answer.ids:
                    assert list(answer.sequence.request.prompt_ids) == [*history, *answer.new]
                history += [*answer.new, *answer.ids]

    def end(self):
        for _ in range(1000):
            if not self.rig.alive:
                break
            self.step(20)
        assert not self.rig.alive
        for answer in self.everything:
            answer.assert_one_final()
        self.each_turn_was_fed_the_history_before_it()
        for conversation in list(self.rig.registry):
            self.rig.turns.manager.end(conversation.id, lambda: None)
        assert len(self.rig.registry) == self.rig.cache.used == self.rig.host.used == 0


def test_conversation_life():
    live(Life, examples=60, operations=50)


@pytest.mark.full
def test_conversation_life_full():
    live(Life, examples=500, operations=100)


def seats_with_conversations(count: int, length: int, **sizes: object) -> TurnEngine:
    """Idle conversations 0, 1, ... of so many tokens, no two with a common beginning."""
    engine = TurnEngine(max_conversations=10, share=False, costs=ALWAYS_SWAP, **sizes)
    for number in range(count):
        engine.turns.submit(turn(number, length, number, start=True))
        finish(engine)
    return engine


def turn(name: int, length: int, seed: int, start: bool = False) -> Turn:
    ids = (10 + seed,) * length
    request = Request(id="", prompt_ids=ids, params=SamplingParams(seed=0, max_tokens=1), arrival=0.0)
    answer = Answer()
    return Turn(name, Sequence(request), answer.append, start=start, kv={} if start else None)


def finish(engine: TurnEngine) -> None:
    while engine.alive:
        assert engine.step().slices
        for sequence in [sequence for sequence in engine.alive if sequence.generated]:
            engine.end(sequence, FinishReason.LENGTH)


def test_one_plan_reads_a_host_block_and_needs_another():
    """What comes back from the host must be read before another conversation is copied over it."""
    # a conversation takes two blocks, and the host has room for one
    engine = seats_with_conversations(4, 6, blocks=6, host=2)
    held = [engine.registry.get(number).held for number in range(4)]
    assert [len(one.host_blocks) for one in held] == [2, 0, 0, 0]
    engine.turns.manager.end(3, lambda: None)
    # the first comes back, and the next needs what the second has
    engine.turns.submit(turn(0, 1, 5))
    engine.turns.submit(turn(9, 6, 6, start=True))
    plan = engine.step()
    assert len(plan.swap_in) == 2
    assert not {host for host, _ in plan.swap_in} & {host for _, host in plan.swap_out}
    finish(engine)


def test_who_comes_back_does_not_lose_its_copy_to_who_makes_room():
    engine = seats_with_conversations(3, 6, blocks=5, host=2)
    assert [len(engine.registry.get(number).held.host_blocks) for number in range(3)] == [2, 0, 0]
    engine.turns.submit(turn(0, 1, 5))
    assert len(engine.step().swap_in) == 2
    finish(engine)


def test_a_queued_turn_is_answered_once():
    engine = TurnEngine(max_conversations=10, blocks=20)
    engine.turns.submit(turn(0, 6, 0, start=True))
    queued = turn(0, 3, 1)
    deltas: list[Delta] = []
    queued.sink = deltas.append
    engine.turns.submit(queued)
    engine.turns.cancel(queued.sequence)
    engine.turns.overdue(queued.sequence)
    finish(engine)
    assert [delta.finish_reason for delta in deltas] == [FinishReason.CANCELLED]
    # what it asked is part of the conversation all the same
    assert len(engine.registry.get(0).history) == 6 + 1 + 3
