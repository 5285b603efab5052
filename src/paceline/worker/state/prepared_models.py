"""The models of one worker as they were when they were prepared: their names and parameters.

`model_layout` applies the plan's layout to them, and `gradient_reducers` reduces their gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.remote_tensors import is_remote
from paceline.comm.sharded_tensors import TensorSlice, full_tensor
from paceline.errors import PlanError
from paceline.parallel.owner_steps.part_exchange import SliceHop
from paceline.plan import ParameterServer
from paceline.sync.allreduce.buckets import NamedParameter
from paceline.worker.state.gradient_reducers import GradientReducers
from paceline.worker.state.model_context import ModelContext
from paceline.worker.state.model_layout import ModelLayout
from paceline.worker.step.weight_penalty import Penalty, WeightPenalty, targets_of
from paceline.worker.topology.parallel_groups import StateOwner
from paceline.worker.topology.recorded_groups import RecordedTensorGroup

if TYPE_CHECKING:
    from paceline.parallel.tensor.plan import ParameterSplit
    from paceline.worker.step.pipeline_stages import PipelineModel, PipelinePass

__all__ = ["PreparedModels"]


class PreparedModels:
    """The registry of prepared models. Only parameters that were there at `prepare(model)` are averaged."""

    def __init__(self, context: ModelContext) -> None:
        self._plan, self._axes, self._tables = context.plan, context.axes, context.tables
        self._names: dict[nn.Module, str] = {}
        self._parameters: dict[nn.Module, list[NamedParameter]] = {}  # of each model, as they were then
        self.stepped_by_owners: set[str] = set()  # full names of parameters whose optimizer state is whole, on one
        self._splits: dict[str, tuple[ParameterSplit, RecordedTensorGroup]] = {}  # by full names
        self._owners: dict[str, StateOwner] = {}  # by full names
        self._shapes: dict[str, list[int]] = {}  # of what is here of each parameter, by full names
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer
        self.layout = ModelLayout(context)
        self.reducers = GradientReducers(context, self.layout, names=self._names, parameters=self._parameters)

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._parameters

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def add(self, model: nn.Module, name: str) -> None:
        """A model was prepared under this name."""
        self._names[model] = name
        self._parameters[model] = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
        self._shapes.update((key, list(parameter.shape)) for key, parameter in self._parameters[model])
        for splits, holders in self.layout.splits(model):
            self._splits.update((f"{name}.{key}", (split, holders)) for key, split in splits.items())
        self._owners.update((f"{name}.{key}", owner) for key, owner in self.layout.owners(model).items())

    def whole(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return the whole of a parameter, or of its gradient, by its full name; all workers of the replica call it.

        None where no model has one.
        """
        if tensor is not None and self._tables is not None and is_remote(tensor):
            return self._tables.whole(tensor)
        owner, complete = self._owners.get(name), None
        if tensor is not None and (owner is None or self._axes.is_at(owner)):
            complete, _ = self.gathered(name, tensor)
        if owner is None:
            return complete
        return self._axes.parted.broadcast_object(complete, source=self._axes.place_of(owner))

    def whole_state(self, name: str, value: Tensor | None) -> Tensor | None:
        """Return the whole of what an optimizer keeps for the parameter of this name, as `whole` does.

        What has not the parameter's own shape here (a count of steps, say) is the same on all workers of a split.
        """
        if name in self.stepped_by_owners:
            value = self._of_any(value)
        split, _ = self._splits.get(name, (None, None))
        if split is None or value is None or list(value.shape) == self._shapes.get(name):
            return self.whole(name, value)
        owner = self._owners.get(name)
        return value if owner is None else self._axes.parted.broadcast_object(value, source=self._axes.place_of(owner))

    def state_keys(self, name: str, here: Sequence[str]) -> Sequence[str]:
        """What an optimizer keeps for the parameter of this name, by the worker that has it; all of the replica call
        it."""
        if name in self.stepped_by_owners:
            here = self._of_any(here) or ()
        owner = self._owners.get(name)
        return here if owner is None else self._axes.parted.broadcast_object(here, source=self._axes.place_of(owner))

    def _of_any(self, value: Any) -> Any:
        """What any of the workers that hold parts of a parameter has: its owner."""
        for group in (self._axes.shard_group, self._axes.tensor, self._axes.experts):
            found = group.gather_objects(value)
            value = next((one for one in found if isinstance(one, Tensor) or one), None)
        return value

    def gathered(self, name: str, tensor: Tensor) -> tuple[Tensor, TensorSlice | None]:
        """Return the whole of a parameter, or of its gradient, by its full name, and the slice of it that is here.

        All workers that have parts of it call it.
        """
        complete = full_tensor(tensor)
        if name not in self._splits:
            return complete, None
        split, holders = self._splits[name]
        cut = TensorSlice(split.shape, split.dim, split.ranges(holders.index))
        return split.gathered(complete, holders), cut

    def slice_hop(self, name: str) -> SliceHop | None:
        """How the parts of a parameter that tensor or expert parallelism has split come together, by its full name."""
        if name not in self._splits:
            return None
        split, holders = self._splits[name]
        is_expert = holders is self._axes.expert_parallel_group
        group = self._axes.experts if is_expert else self._axes.tensor
        slices = [TensorSlice(split.shape, split.dim, split.ranges(member)) for member in range(group.size)]
        return SliceHop("experts" if is_expert else "tensor", group, tuple(split.shape), slices)

    def routed_experts(self) -> tuple[str, ...]:
        """The full names of modules of whose experts each worker has some."""
        return tuple(f"{name}.{one}" for model, name in self._names.items() for one in self.layout.routed(model))

    def split_kinds(self) -> dict[str, str]:
        """How parameters are spread over the workers of a replica, in words, by their full names."""
        found = {
            name: f"of stage {owner.stage}" if owner.expert in (None, 0) else "of experts on other workers"
            for name, owner in self._owners.items()
        }
        experts = self._axes.expert_parallel_group
        for name, (_, holders) in self._splits.items():
            found[name] = "of experts, split over workers" if holders is experts else "split over workers"
        return found

    def whole_here(self, name: str, tensor: Tensor) -> Tensor:
        """Return the whole of a tensor of the state on the workers that have a part of it, all of which call it."""
        if self._tables is not None and is_remote(tensor):
            return self._tables.whole(tensor)
        return self.gathered(name, tensor)[0]

    def pipelined(self, models: Sequence[nn.Module], loss_of: Callable[[Any], Any]) -> PipelinePass | None:
        """How a stepper's micro-batches go through the stages, None without; raises PlanError for several models."""
        if self._axes.link is None:
            return None
        if len(models) > 1:
            raise PlanError(
                f"a stepper over {len(models)} models under Layout(stages={self._plan.layout.stages}): one pipeline is "
                "of one model. Make a stepper for each, or one module of all that are trained together"
            )
        from paceline.worker.step.pipeline_stages import PipelinePass

        # With stages, preparing a model has partitioned it.
        return PipelinePass(cast("PipelineModel", self.layout.stages(models[0])), loss_of)

    def penalty(self, models: Sequence[nn.Module], penalty: Penalty) -> WeightPenalty:
        """A penalty on the parameters of these models; raises PlanError where optimizers run on servers."""
        if isinstance(self._plan.sync, ParameterServer):
            raise PlanError(
                f"a penalty on weights under {self._plan.sync}: gradients leave for the servers, which step the "
                "optimizer, before the penalty could be added. Use the optimizer's weight_decay, or sync=AllReduce()"
            )
        targets = [
            target
            for model in models
            for target in targets_of(model, self._parameters[model], splits=self._splits, owners=self._owners)
        ]
        return WeightPenalty(penalty, targets, axes=self._axes)

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that are not averaged: those of models, or of parts of them, that were not there at
        `prepare(model)`. Raises ValueError."""
        held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if self._num_checked.get(optimizer) == len(held):
            return
        known = {id(parameter) for parameters in self._parameters.values() for _, parameter in parameters}
        strangers = sum(id(parameter) not in known for parameter in held)
        if strangers:
            raise ValueError(
                f"{type(optimizer).__name__} holds {strangers} parameters that were in no model when it was "
                "prepared: they would not be averaged. Replace or add layers before worker.prepare(model), then make "
                "the optimizer"
            )
        self._num_checked[optimizer] = len(held)
