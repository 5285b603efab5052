"""The objects that a worker has prepared: each is registered under a name, and filled from the state of the run."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import TensorSlice
from paceline.errors import PlanError
from paceline.events import Event, Warned
from paceline.parallel.class_name import class_name
from paceline.parallel.offload.memory import memory_for, why_no_disk
from paceline.parallel.offload.optimizer_state import OffloadedState
from paceline.plan import ParameterServer, Plan
from paceline.sync.local.weight_averaging import WeightAveraging
from paceline.worker.state.optimizer_check import (
    choices_of,
    require_own_parameters,
    require_possible_steps,
    require_storable_state,
)
from paceline.worker.state.owner_splits import OwnerSplits
from paceline.worker.state.resumed_state import ResumedState
from paceline.worker.state.rounded_states import RoundedStates
from paceline.worker.state.state_registry import StateRegistry
from paceline.worker.state.weight_average import AverageState, ExponentialMovingAverage, state_of
from paceline.worker.step.model_buffers import BufferAverager
from paceline.worker.topology.parallel_groups import StateOwner

__all__ = ["PreparedObjects"]

OUTER_OPTIMIZER = "outer_optimizer"  # under which the one between replicas is stored


class PreparedObjects:
    """Registers models, optimizers and other objects, and has each filled as soon as it is registered."""

    def __init__(
        self,
        plan: Plan,
        registry: StateRegistry,
        *,
        resumed: ResumedState,
        buffers: BufferAverager,
        emit: Callable[[Event], None],
        splits: OwnerSplits,
        rounded: RoundedStates,
    ) -> None:
        self.registry = registry
        self._plan, self._resumed, self._buffers, self._emit = plan, resumed, buffers, emit
        self._splits, self.rounded = splits, rounded
        self._choices: dict[Optimizer, tuple[object, ...]] = {}  # options of optimizers when they were tried
        self._outer: list[str] = []  # names of the optimizers between replicas

    def model(
        self,
        model: nn.Module,
        name: str | None,
        *,
        slices: Mapping[str, TensorSlice],
        owners: Mapping[str, StateOwner],
        tables: Collection[str] = (),
        buffers: Mapping[str, str] | None = None,
    ) -> str:
        """Register a model that has been placed, fill it, and make it equal everywhere; returns its name.

        `slices`: what is here of its parameters that are split. `owners`: the worker that stores each of its tensors,
        where workers have different ones. `tables`: parameters that a newcomer need not be sent, since servers have
        them. `buffers`: rules that the script gives to buffers, by patterns of names.
        """
        self._refuse_known(model)
        if "gather" in (buffers or {}).values() and (self._plan.is_local or self._plan.is_asynchronous):
            raise PlanError(
                f"prepare(buffers={dict(buffers or {})!r}) under {self._plan.sync!r}: replicas take steps by "
                "themselves, so the rows that they would gather have no order. Use sync=AllReduce(), or another rule"
            )
        full_name = self.registry.name_for("model", name)
        self.registry.models[full_name] = model
        self.registry.slices.update((f"{full_name}.{key}", part) for key, part in slices.items())
        self.registry.owners.update((f"{full_name}.{key}", owner) for key, owner in owners.items())
        self.registry.tables.update(f"{full_name}.{key}" for key in tables)
        self._resumed.note_frozen(full_name)
        self._resumed.fill_model(full_name)
        self._buffers.add(model, buffers)
        return full_name

    def is_fresh(self, model: nn.Module, name: str | None) -> bool:
        """Whether a model that is going to be prepared begins with weights of its own: a state has not all of them."""
        self._refuse_known(model)
        return not self._resumed.has_whole_model(self.registry.name_for("model", name))

    def _refuse_known(self, model: nn.Module) -> None:
        if any(model is known for known in self.registry.models.values()):
            raise ValueError(f"this {class_name(model)} is prepared already; prepare each model once")

    def optimizer(self, optimizer: Optimizer, name: str | None) -> None:
        """Register an optimizer, and fill it."""
        require_own_parameters(optimizer, self.registry)
        whole = require_possible_steps(optimizer, self.registry, self._plan)
        self._choices[optimizer] = choices_of(optimizer)
        if (text := require_storable_state(optimizer, self.registry, self._plan, whole)) is not None:
            self._emit(Warned(text=text))
        full_name = self.registry.name_for("optimizer", name)
        if self.rounded.is_used:
            self.rounded.add(full_name, optimizer)
        if self._splits.may_own(optimizer):
            self._splits.settle(full_name, optimizer, whole, self.rounded.own_step(optimizer))
        else:
            self.rounded.take_over(optimizer)
        self.registry.optimizers[full_name] = optimizer
        if self._plan.compute.offload != "none":
            self._offload(full_name, optimizer)
        self._resumed.fill_optimizer(full_name)

    def check_choices(self, optimizer: Optimizer) -> None:
        """Try an optimizer again where the script has since switched an option, or added a group; raises PlanError
        as `prepare` does. Rates and counts may change in every step, and are not looked at."""
        choices = choices_of(optimizer)
        if self._choices.setdefault(optimizer, choices) != choices:
            whole = require_possible_steps(optimizer, self.registry, self._plan)
            name = next(name for name, one in self.registry.optimizers.items() if one is optimizer)
            if self._splits.may_own(optimizer):
                self._splits.settle(name, optimizer, whole, self.rounded.own_step(optimizer))
            self._choices[optimizer] = choices

    def _offload(self, name: str, optimizer: Optimizer) -> None:
        """Keep an optimizer's state where the plan says. Raises PlanError where there is no room."""
        compute = self._plan.compute
        self.registry.offloaded[name] = OffloadedState(optimizer, memory_for(compute))
        warning = why_no_disk(compute)
        if warning is not None and len(self.registry.offloaded) == 1:
            self._emit(Warned(text=warning))

    def average(self, average: ExponentialMovingAverage, name: str | None, *, close: Callable[[], None]) -> None:
        """Register an average of a model's weights, begin it with the present ones, and fill it.

        `close()` frees rows that are gathered at present. Raises PlanError where replicas have different weights.
        """
        if self._plan.is_local or isinstance(self._plan.sync, ParameterServer):
            raise PlanError(
                f"ExponentialMovingAverage under {self._plan.sync!r}: between two agreements each replica has other "
                "weights, or they are on servers, so each would average something else. Use sync=AllReduce(), or "
                "average the checkpoints of the run"
            )
        state = state_of(average)
        require_own_parameters(state, self.registry)
        full_name = self.registry.name_for("average", name)
        state.close = close
        state.begin()
        self.registry.optimizers[full_name] = state
        if self._resumed.has_optimizer(full_name) or not self._resumed.step:
            self._resumed.fill_optimizer(full_name)
        else:
            text = (
                f"the checkpoint has no average {full_name!r}: it begins with the weights of step {self._resumed.step}"
            )
            self._emit(Warned(text=text))

    def require_own_weights(self, what: str) -> None:
        """Raise RuntimeError while averages are in a model in place of its weights."""
        for one in self.registry.optimizers.values():
            if isinstance(one, AverageState):
                one.require_own_weights(what)

    def other(self, thing: Any, name: str | None) -> None:
        """Register a scheduler or another stateful object, and fill it."""
        is_scheduler = isinstance(thing, torch.optim.lr_scheduler.LRScheduler)
        full_name = self.registry.name_for("scheduler" if is_scheduler else "object", name)
        self.registry.objects[full_name] = thing
        self._resumed.fill_object(full_name)

    def own_optimizers(self) -> list[Optimizer]:
        """The user's optimizers, in the order in which they were prepared: without those between replicas."""
        return [one for name, one in self.registry.optimizers.items() if name not in self._outer]

    def trained(self) -> list[nn.Parameter]:
        """The parameters that the user's optimizers hold."""
        found = self.own_optimizers()
        return [parameter for one in found for group in one.param_groups for parameter in group["params"]]

    def register_averaging(self, averaging: Sequence[WeightAveraging]) -> None:
        """Register what averages weights between replicas, with the outer optimizers, in place of what did before."""
        registry = self.registry
        known: dict[str, dict[str, Any]] = {}
        for name in self._outer:
            known.update((registry.stand_ins[id(p)], held) for p, held in registry.optimizers.pop(name).state.items())
        is_first, self._outer = not self._outer, []
        registry.stand_ins = {id(anchor): name for one in averaging for name, anchor in one.anchors}
        for number, one in enumerate(averaging, 1):
            if one.optimizer is None:
                continue
            name = OUTER_OPTIMIZER if len(averaging) == 1 else f"{OUTER_OPTIMIZER}_{number}_of_{len(averaging)}"
            registry.optimizers[name] = one.optimizer
            self._outer.append(name)
            kept: dict[torch.Tensor, Any] = {p: known[key] for key, p in one.anchors if key in known}
            one.optimizer.state.update(kept)
            if is_first and self._resumed.has_optimizer(name):
                self._fill_outer(name, one.optimizer)

    def _fill_outer(self, name: str, optimizer: Optimizer) -> None:
        """Fill an outer optimizer. Its options stay those of the plan."""
        options = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
        self._resumed.fill_optimizer(name)
        for group, of_plan in zip(optimizer.param_groups, options, strict=True):
            group.update(of_plan)
