"""Whatever happens in whatever order: every sequence reads its own content only, nothing leaks, everyone ends."""

import math

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from kvloom.kv.prefix_index import KEY_TYPES
from kvloom.request import SamplingParams, Sequence
from kvloom.scheduling import scheduler
from kvloom.scheduling.scheduler import Costs
from support.block_rig import ALWAYS_SWAP, BLOCK, NEVER_SWAP, Rig
from support.life import LifeMachine, live

TOKENS = st.lists(st.sampled_from([0, 1]), min_size=1, max_size=2 * BLOCK)


class Life(LifeMachine):
    """Requests that share much, on a pool that is too small for them."""

    @initialize(
        blocks=st.sampled_from([6, 8, 10, 12, 3]),
        host=st.sampled_from([20, 4, 0]),
        costs=st.sampled_from([ALWAYS_SWAP, NEVER_SWAP, Costs(copy_block_s=1.0, compute_token_s=0.55)]),
        max_running=st.sampled_from([6, 4, 2]),
        max_batch_tokens=st.sampled_from([40, 15, 6, 2]),
        retain_limit=st.sampled_from([0, 4, 16]),
        share=st.sampled_from([True, True, True, False]),
        block_hash=st.sampled_from(sorted(KEY_TYPES)),
    )
    def build(self, retain_limit, **sizes):
        self.begin(scheduler)
        self.rig = Rig(retain_limit=min(retain_limit, sizes["blocks"]), **sizes)
        self.texts = [[0] * 8]
        self.lengths: dict[Sequence, int] = {}

    @precondition(lambda self: len(self.rig.alive) < 8)
    @rule(
        data=st.data(),
        tail=TOKENS,
        salt=st.sampled_from(["", "", "", "other"]),
        priority=st.integers(-1, 1),
        retain_s=st.sampled_from([0.0, 0.0, 0.0, 5.0, 20.0, -1.0]),
        longest=st.sampled_from([9, 12, 24]),
        length=st.sampled_from([24, 40, 12, 1]),
        seed=st.integers(0, 2),
    )
    def add(self, data, tail, longest, length, seed, salt, priority, retain_s):
        """A prompt that begins as another one, or its answer, did."""
        text = data.draw(st.sampled_from(self.texts))
        kept = data.draw(st.integers(0, len(text)).map(lambda left: len(text) - left))
        # short enough that several run at once, and grow until they are in each other's way
        prompt = [*text[:kept], *tail][: min(longest, self.rig.cache.total * BLOCK)]
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
    @rule(steps=st.sampled_from([10, 3, 1, 20]))
    def step(self, steps):
        for _ in range(steps):
            self.rig.step()
            for sequence in [s for s in self.rig.alive if s.generated >= self.lengths[s]]:
                self.rig.remove(sequence)
            if not self.rig.alive:
                break

    @precondition(lambda self: self.rig.alive)
    @rule(data=st.data(), how=st.sampled_from(["cancel", "cancel", "cancel", "fail", "flush"]))
    def disturb(self, data, how):
        if how == "cancel":
            self.rig.remove(data.draw(st.sampled_from(self.rig.alive)))
        elif how == "fail":
            self.rig.failing_step()
        else:
            self.rig.cache.flush()
            assert self.rig.cache.cached == 0

    @rule(seconds=st.sampled_from([0.1, 4.0, 30.0]))
    def wait(self, seconds):
        self.clock.now += seconds

    @invariant()
    def no_more_is_retained_than_allowed(self):
        if self.rig is not None:
            assert self.rig.cache.retained <= self.rig.cache.retain_limit

    def end(self):
        self.rig.run()
        assert self.rig.cache.used == self.rig.host.used == 0
        self.clock.now = math.inf
        self.rig.cache.begin(self.clock.now)
        assert self.rig.cache.extend([], self.rig.cache.total * BLOCK)


def test_life():
    live(Life, examples=100, operations=50)


@pytest.mark.full
def test_life_full():
    live(Life, examples=500, operations=100)
