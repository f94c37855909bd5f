"""Whatever happens in whatever order: every sequence reads its own content only, nothing leaks, everyone ends."""

import math
from unittest import mock

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from block_rig import ALWAYS_SWAP, BLOCK, NEVER_SWAP, Clock, Rig
from kvloom import scheduler
from kvloom.kv.cache import KEY_TYPES
from kvloom.request import SamplingParams, Sequence
from kvloom.scheduler import Costs

TOKENS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=5 * BLOCK)


class Life(RuleBasedStateMachine):
    """Requests that share much, on a pool that is too small for them."""

    @initialize(
        blocks=st.integers(3, 24),
        host=st.integers(0, 12),
        costs=st.sampled_from([ALWAYS_SWAP, NEVER_SWAP, Costs(copy_block_s=1.0, compute_token_s=0.4)]),
        max_running=st.integers(1, 6),
        max_batch_tokens=st.integers(1, 40),
        retain_limit=st.integers(0, 24),
        share=st.sampled_from([True, True, True, False]),
        block_hash=st.sampled_from(sorted(KEY_TYPES)),
    )
    def build(self, retain_limit, **sizes):
        self.clock = Clock()
        self.patch = mock.patch.object(scheduler, "time", self.clock)
        self.patch.start()
        self.rig = Rig(retain_limit=min(retain_limit, sizes["blocks"]), **sizes)
        self.texts = [[0] * 8]
        self.lengths: dict[Sequence, int] = {}

    @rule(
        data=st.data(),
        tail=TOKENS,
        salt=st.sampled_from(["", "", "", "other"]),
        priority=st.integers(-1, 1),
        retain_s=st.sampled_from([0.0, 0.0, 0.0, 5.0, 20.0, -1.0]),
        length=st.integers(1, 20),
        seed=st.integers(0, 2),
    )
    def add(self, data, tail, length, seed, salt, priority, retain_s):
        """A prompt that begins as another one, or its answer, did."""
        text = data.draw(st.sampled_from(self.texts))
        kept = data.draw(st.integers(0, len(text)))
        prompt = [*text[:kept], *tail][: self.rig.cache.total * BLOCK]
        added = self.rig.add(
            prompt,
            arrival=self.clock.now,
            params=SamplingParams(seed=seed),
            cache_salt=salt,
            priority=priority,
            retain_s=retain_s,
        )
        self.lengths[added] = length
        self.texts = [*self.texts[-8:], added.tokens]

    @precondition(lambda self: self.rig.alive)
    @rule(steps=st.integers(1, 4))
    def step(self, steps):
        for _ in range(steps):
            self.rig.step()
            for sequence in [s for s in self.rig.alive if s.generated >= self.lengths[s]]:
                self.rig.remove(sequence)

    @precondition(lambda self: self.rig.alive)
    @rule()
    def fail(self):
        self.rig.failing_step()

    @precondition(lambda self: self.rig.alive)
    @rule(data=st.data())
    def cancel(self, data):
        self.rig.remove(data.draw(st.sampled_from(self.rig.alive)))

    @rule()
    def flush(self):
        self.rig.cache.flush()
        assert self.rig.cache.cached == 0

    @rule(seconds=st.sampled_from([0.1, 4.0, 30.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def everything_is_accounted_for(self):
        if hasattr(self, "rig"):
            self.rig.check()
            assert self.rig.cache.retained <= self.rig.cache.retain_limit

    def teardown(self):
        """Whoever is left ends, and nothing is held by anyone."""
        if not hasattr(self, "rig"):
            return
        try:
            self.rig.run()
            assert self.rig.cache.used == self.rig.host.used == 0
            self.clock.now = math.inf
            self.rig.cache.begin(self.clock.now)
            assert self.rig.cache.extend([], self.rig.cache.total * BLOCK)
        finally:
            self.patch.stop()


def live(examples: int, operations: int) -> None:
    run_state_machine_as_test(
        Life,
        settings=settings(
            max_examples=examples,
            stateful_step_count=operations,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )


def test_life():
    live(examples=20, operations=50)


@pytest.mark.full
def test_life_full():
    live(examples=100, operations=100)
