"""Which parameters of an optimizer are stepped by an owner, which worker that is, and who stores their state."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from paceline.comm.sharded_tensors import is_sharded
from paceline.errors import PlanError
from paceline.parallel.check.optimizer_requirements import BY_NUMBER
from paceline.parallel.fully_sharded.sharded_model import ShardGroup
from paceline.parallel.owner_steps.owner_stepping import OwnerStepping
from paceline.parallel.owner_steps.ownership import LoadTable
from paceline.parallel.owner_steps.part_exchange import PartHop, RowHop, SplitParameter, TrafficTotals
from paceline.plan import Plan
from paceline.worker.state.prepared_models import PreparedModels
from paceline.worker.state.state_registry import StateRegistry, WholeState
from paceline.worker.topology.parallel_groups import ParallelGroups

__all__ = ["OwnerSplits"]


class OwnerSplits:
    """Has optimizers step whole parameters at their owners, in the order in which the optimizers are prepared."""

    def __init__(
        self,
        plan: Plan,
        registry: StateRegistry,
        models: PreparedModels,
        axes: ParallelGroups,
        traffic: TrafficTotals,
    ) -> None:
        self._layout, self._registry, self._models = plan.layout, registry, models
        self._axes, self._traffic = axes, traffic
        self._is_here = plan.compute.offload == "none"
        self._loads = LoadTable()
        self._steppings: dict[Optimizer, OwnerStepping] = {}

    def settle(
        self,
        name: str,
        optimizer: Optimizer,
        parameters: Collection[Tensor],
        own_step: Callable[[Optimizer], Any] | None = None,
    ) -> None:
        """Have these of an optimizer's parameters stepped by owners from now on, and no others. `own_step` steps them,
        or the optimizer's own.

        Raises PlanError where parameters have been stepped otherwise before.
        """
        names = self._registry.parameter_names()
        stepping = self._steppings.get(optimizer)
        known: Mapping[Tensor, SplitParameter] = {} if stepping is None else stepping.split
        held = [p for group in optimizer.param_groups for p in group["params"]]
        new = [one for one in parameters if one not in known]
        strays = [one for one in held if (one in known and not _has(parameters, one))]
        if strays or (new and stepping is not None and self._layout.is_elastic):
            raise PlanError(
                f"{name} now looks at {names[id((strays or new)[0])]} in another way than when it was prepared (as a "
                f"whole, or number by number), but under {self._layout!r} the one has its state at an owner, and the "
                "other in parts. Give the optimizer all groups and options before worker.prepare(optimizer)"
            )
        split = self._placed({names[id(one)]: one for one in new})
        if stepping is None:
            self._steppings[optimizer] = OwnerStepping(optimizer, split, self._traffic, own_step)
        else:
            stepping.add(split)
        self._models.stepped_by_owners.update(names[id(one)] for one in new)
        for one in new:
            self._registry.whole_states[f"{name}.state.{names[id(one)]}"] = self._state_of(split[one])

    def may_own(self, optimizer: Optimizer) -> bool:
        """Whether owners may have to step an optimizer's parameters, now or when the script has switched an option. Its
        step must be taken over before: a step under way stays as it was."""
        is_split = self._layout.shard > 1 or bool(self._registry.slices)
        return is_split and self._is_here and type(optimizer) not in BY_NUMBER

    def _placed(self, parameters: Mapping[str, Tensor]) -> dict[Tensor, SplitParameter]:
        hops = {name: self.hops(name, one) for name, one in parameters.items()}
        by_axes: dict[tuple[tuple[str, int], ...], dict[str, tuple[int, ...]]] = {}
        for name, path in hops.items():
            axes = tuple((hop.axis, hop.group.size) for hop in path)
            by_axes.setdefault(axes, {})[name] = path[-1].shape
        found: dict[Tensor, SplitParameter] = {}
        for axes, shapes in by_axes.items():
            for name, owner in self._loads.place(shapes, axes).items():
                at: list[int] = []
                for _, size in reversed(axes):
                    owner, index = divmod(owner, size)
                    at.insert(0, index)
                found[parameters[name]] = SplitParameter(name, hops[name], tuple(at))
        return {one: found[one] for one in parameters.values()}

    def hops(self, name: str, parameter: Tensor) -> tuple[PartHop, ...]:
        """Return the axes over which a parameter is split, the innermost first."""
        found: list[PartHop] = []
        if is_sharded(parameter):
            rows = self._rows_of(parameter)
            found.append(RowHop("rows", rows.group, tuple(parameter.shape)))
        cut = self._models.slice_hop(name)
        return (*found, *(() if cut is None else (cut,)))

    def _rows_of(self, parameter: Any) -> ShardGroup:
        axes = self._axes
        groups = [one for one in (axes.rows, axes.expert_rows) if one is not None]
        return next(one for one in groups if one.mesh == parameter.device_mesh)

    def _state_of(self, split: SplitParameter) -> WholeState:
        """Where a parameter's state is: of workers that hold the same, the first stores it."""
        axes, over = self._axes, {hop.axis for hop in split.hops}
        same = {"rows": axes.shard_group, "tensor": axes.tensor}
        is_first = all(group.index == 0 for axis, group in same.items() if axis not in over)
        return WholeState(is_here=split.is_own, is_stored_here=split.is_own and is_first)


def _has(parameters: Collection[Tensor], wanted: Tensor) -> bool:
    return any(one is wanted for one in parameters)
