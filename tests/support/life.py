"""What state machines share that live through everything: a clock of their own, a check after every rule, an end."""

from types import ModuleType
from unittest import mock

from hypothesis import HealthCheck, settings
from hypothesis.stateful import RuleBasedStateMachine, invariant, run_state_machine_as_test

from support.block_rig import Clock, Rig


class LifeMachine(RuleBasedStateMachine):
    """Its first rule is an ``initialize`` that calls ``begin`` and then makes the rig.

    Attributes:
        rig: None until then.
        clock: what the rig takes for the time.
    """

    rig: Rig | None = None

    def begin(self, *modules: ModuleType) -> None:
        """Let the clock stand for the module ``time`` in these."""
        self.clock = Clock()
        self._patches = [mock.patch.object(module, "time", self.clock) for module in modules]
        for patch in self._patches:
            patch.start()

    @invariant()
    def everything_is_accounted_for(self):
        if self.rig is not None:
            self.rig.check()

    def end(self) -> None:
        """Whoever is left ends, and nothing is held by anyone."""
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
    """Run a machine."""
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples,
            stateful_step_count=operations,
            deadline=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
