"""Which optimizers have their state in bf16, and how many steps each has taken: by that its numbers are rounded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch.optim import Optimizer

from paceline.parallel.rounded_state.rounded_stepping import RoundedStepping, StepCount
from paceline.parallel.step_takeover import take_over_step, unhooked_step
from paceline.plan import Plan
from paceline.worker.state.state_registry import StateRegistry

__all__ = ["RoundedStates"]


class RoundedStates:
    """Rounds the state of all optimizers, where the plan says so."""

    def __init__(self, plan: Plan, registry: StateRegistry) -> None:
        self.is_used = plan.compute.state == "bf16"
        self._seed, self._registry = plan.batch.seed, registry
        self._counts: dict[str, StepCount] = {}
        self._steppings: dict[Optimizer, RoundedStepping] = {}

    def add(self, name: str, optimizer: Optimizer) -> None:
        """Keep the state of an optimizer of this name in bf16; its step is still its own."""
        names = self._registry.parameter_names()
        self._steppings[optimizer] = RoundedStepping(
            optimizer,
            unhooked_step(optimizer),
            seed=self._seed,
            count=self._counts.setdefault(name, StepCount()),
            name_of=lambda parameter: names[id(parameter)],
            slice_of=self._registry.slices.get,
        )

    def own_step(self, optimizer: Optimizer) -> Callable[[Optimizer], Any] | None:
        """What steps an optimizer whose state is in bf16; None: its own step does."""
        found = self._steppings.get(optimizer)
        return None if found is None else found.step

    def take_over(self, optimizer: Optimizer) -> None:
        """Have the step of an optimizer round its state."""
        if (step := self.own_step(optimizer)) is not None:
            take_over_step(optimizer, lambda: step(optimizer))

    def state_dict(self) -> dict[str, int]:
        """How many steps each optimizer has taken, by its name."""
        return {name: count.num_steps for name, count in self._counts.items()}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on counting from these numbers, also for optimizers that are still to come."""
        for name, num_steps in state.items():
            self._counts.setdefault(name, StepCount()).num_steps = num_steps
