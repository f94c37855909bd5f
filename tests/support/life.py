"""The base of hypothesis state machines: a simulated clock, a check after every rule, and an end."""

from types import ModuleType
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from support.block_rig import Clock, Rig


class LifeMachine(RuleBasedStateMachine):
    """A state machine whose first rule, an ``initialize``, calls ``begin`` and then creates the rig.

    Attributes:
        rig: the rig; None before the first rule.
        clock: the rig's clock.
    """

    rig: Rig | None = None

    def begin(self, *modules: ModuleType) -> None:
        """Replace the module ``time`` in these modules with the clock."""
        self.clock = Clock()
        self._patches = [mock.patch.object(module, "time", self.clock) for module in modules]
        for patch in self._patches:
            patch.start()

    @invariant()
    def everything_is_accounted_for(self):
        if self.rig is not None:
            self.rig.check()

    def end(self) -> None:
        """End everything that is left, and check that nothing is held."""
        raise NotImplementedError

    def teardown(self):
        if self.rig is None:
            return
        try:
            self.end()
        finally:
            for patch in self._patches:
                patch.stop()


def live(machine: type[LifeMachine], examples: int, operations: int) -> None:
    """Run a state machine."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=operations,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
