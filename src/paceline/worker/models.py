"""The models of one worker as they were when they were prepared, and the sums of their gradients over all workers."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from paceline.comm.group import WorkerGroup
from paceline.comm.ring import Ring
from paceline.comm.split import whole
from paceline.errors import PlanError, SyncError
from paceline.parallel.apply import place, send_from_first
from paceline.parallel.shard import ShardedModel, Shards
from paceline.plan import Plan
from paceline.sync.allreduce import CutGradients, GradientSum, Spread
from paceline.sync.buckets import Named
from paceline.worker.axes import Axes
from paceline.worker.cutters import Sharers

if TYPE_CHECKING:
    from paceline.parallel.tensor.plan import ParameterCut
    from paceline.worker.pipelined import Pipelined
    from paceline.worker.stages import StagedModel

__all__ = ["Hints", "Models"]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Hints:
    """What a script says of a model, for layouts that have to look into it."""

    sample: Any = None  # arguments of a small forward: (x,) or {"input_ids": x}
    cut: Mapping[str, str] | None = None  # its own roles for layers: {"layers.*.attn.q": "column", ...}
    stages: Sequence[str] = ()  # the units that stages after the first begin with
    tokenwise: Sequence[str] = ()  # modules that treat each token by itself though nobody can see it: "layers.*.moe"


class Models:
    """Knows which parameters are averaged; one `GradientSum` for each set of models that a walk is about."""

    def __init__(
        self,
        plan: Plan,
        *,
        group: WorkerGroup,
        axes: Axes,
        shards: Shards,
        ring: Ring,
        note: Callable[[str], None],
    ) -> None:
        """`note` is told how a model is cut, in words."""
        self._plan, self._group, self._axes, self._shards, self._ring = plan, group, axes, shards, ring
        self._note = note
        self._cuts: dict[nn.Module, Mapping[str, ParameterCut]] = {}
        self._cut_names: dict[str, ParameterCut] = {}  # by full names
        self._parts: set[int] = set()  # ids of parameters that are cut
        self._partial: set[int] = set()  # and of whole ones of whose gradients each worker has a part
        self._staged: dict[nn.Module, StagedModel] = {}
        self._homes: dict[str, int] = {}  # by full names: which stage's worker has the word on a tensor
        self._parameters: dict[nn.Module, list[Named]] = {}  # of each model, as they were then
        self._sums: dict[tuple[int, ...], GradientSum] = {}  # by the models that a walk is about
        self._num_checked: dict[Optimizer, int] = {}  # parameters of each prepared optimizer

    def __contains__(self, model: nn.Module) -> bool:
        return model in self._parameters

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._parameters)

    def __len__(self) -> int:
        return len(self._parameters)

    def place(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: Hints) -> None:
        """Convert, move, wrap and split a model as the plan says. `is_fresh`: no checkpoint will fill it."""
        place(
            model,
            self._plan,
            device=device,
            cut=lambda whole: self._cut(whole, device=device, is_fresh=is_fresh, hints=hints),
            split=lambda whole: self._split(whole, is_fresh=is_fresh),
        )

    def add(self, model: nn.Module, name: str) -> None:
        """A model was prepared under this name."""
        self._parameters[model] = [(f"{name}.{key}", parameter) for key, parameter in model.named_parameters()]
        self._cut_names.update((f"{name}.{key}", cut) for key, cut in self.cuts(model).items())
        self._homes.update((f"{name}.{key}", home) for key, home in self.homes(model).items())

    def whole(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """Return the whole of a parameter, or of its gradient, by its full name; all workers of the replica call it.

        None where nobody has one.
        """
        if name in self._homes:
            home, group = self._homes[name], self._axes.stages
            return group.broadcast_object(tensor if home == group.index else None, source=home)
        if tensor is None:
            return None
        complete = whole(tensor)
        if name not in self._cut_names or self._axes.cutters is None:
            return complete
        return self._cut_names[name].whole(self._axes.cutters.all_gather(complete))

    def cuts(self, model: nn.Module) -> Mapping[str, ParameterCut]:
        """Which parameters of a model are cut, by every name that they have in it."""
        return self._cuts.get(model, {})

    def homes(self, model: nn.Module) -> Mapping[str, int]:
        """Which of the stages' workers has the word on what of a model's state; empty where there are no stages."""
        return self._staged[model].homes() if model in self._staged else {}

    def staged(self, model: nn.Module) -> StagedModel | None:
        """The stages of a model that are here; None where it is not cut into stages."""
        return self._staged.get(model)

    def pipelined(self, models: Sequence[nn.Module], loss_of: Callable[[Any], Any]) -> Pipelined | None:
        """How a stepper's micro-batches go through the stages, None without; raises PlanError for several models."""
        if self._axes.link is None:
            return None
        if len(models) > 1:
            raise PlanError(
                f"a stepper over {len(models)} models under Layout(stages={self._plan.layout.stages}): one pipeline is "
                "of one model. Make a stepper for each, or one module of all that are trained together"
            )
        from paceline.worker.pipelined import Pipelined

        return Pipelined(self._staged[models[0]], loss_of)

    def sum_over(self, models: Sequence[nn.Module]) -> GradientSum:
        """The sum of the gradients of these models together."""
        key = tuple(id(model) for model in models)
        if key not in self._sums:
            named = [pair for model in models for pair in self._parameters[model]]
            self._sums[key] = GradientSum(
                named,
                group=self._axes.across,
                sync=self._plan.sync,
                wire=self._plan.wire,
                everybody=self._group,
                inside=self._axes.inside,
                is_used=self._shards.is_used,
                cut=self._cut_gradients(models),
            )
        return self._sums[key]

    def check(self, optimizer: Optimizer) -> None:
        """Refuse parameters that nobody averages: those of models, or of parts of them, that were not there at
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

    def members_changed(self) -> None:
        """The members are others: forget what was made for the old ones."""
        for gradients in self._sums.values():
            gradients.members_changed()

    def num_bytes_sent(self) -> int:
        """What went to the wire so far."""
        across = sum(gradients.num_bytes_sent for gradients in self._sums.values())
        return across + self._shards.traffic.num_bytes_sent + self._axes.num_bytes_sent

    def _cut(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: Hints) -> None:
        """Cut a whole model into stages, or its layers, over the workers of this replica, as the layout says."""
        layout, cutters = self._plan.layout, self._axes.cutters
        if self._axes.link is not None:
            self._cut_into_stages(model, device=device, is_fresh=is_fresh, hints=hints)
        if self._axes.sharers is not None:
            self._share_sequences(model, self._axes.sharers, is_fresh=is_fresh, hints=hints)
        if cutters is None:
            return
        from paceline.parallel.tensor.apply import apply_plan
        from paceline.parallel.tensor.find import find_plan

        if is_fresh:
            send_from_first([*model.parameters(), *model.buffers()], self._group)
        plan = find_plan(
            model,
            size=layout.tensor,
            plan="auto" if hints.cut is None else hints.cut,
            sample=hints.sample,
            sequence=layout.sequence,
        )
        if not plan.layers:
            raise PlanError(
                f"Layout(tensor={layout.tensor}) found no layers of {type(model).__name__} that can be cut among "
                f"{layout.tensor} workers:\n{plan}\nUse shard={layout.tensor} in its place, which splits any model."
            )
        first = self._group.broadcast_object(plan.layers)
        if first != plan.layers:
            raise SyncError(
                "worker 0 cuts other layers of the model than this worker, so they do not have the same model, or the "
                "same version of torch: make it equal on all workers before worker.prepare(model)"
            )
        cut = apply_plan(model, plan, cutters)
        self._cuts[model] = cut.parameters
        names = dict(model.named_parameters(remove_duplicate=False))
        self._parts.update(id(names[name]) for name in cut.parameters)
        self._partial.update(map(id, cut.summed))
        self._note(plan.headline)

    def _share_sequences(self, model: nn.Module, sharers: Sharers, *, is_fresh: bool, hints: Hints) -> None:
        """Have a model work on this worker's part of each sequence. The first worker finds out how, for all: it takes
        some copies of the model in double precision."""
        from paceline.parallel.context.apply import apply_plan
        from paceline.parallel.context.find import find_plan
        from paceline.parallel.context.plan import ContextPlan

        if is_fresh:
            send_from_first([*model.parameters(), *model.buffers()], self._group)
        found: ContextPlan | str | None = None
        if self._group.index == 0:
            try:
                found = find_plan(model, size=sharers.size, sample=hints.sample, tokenwise=hints.tokenwise)
            except PlanError as error:
                found = str(error)
        found = self._group.broadcast_object(found)
        if not isinstance(found, ContextPlan):
            raise PlanError(found or "worker 0 did not say how sequences are shared")
        apply_plan(model, found, sharers)
        self._note(str(found).partition("\n")[0])

    def _cut_into_stages(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: Hints) -> None:
        """Keep this worker's stages of a whole model, as the layout says."""
        from paceline.worker.stages import StagedModel, cut_model

        layout, link = self._plan.layout, self._axes.link
        if link is None:
            return
        # What no checkpoint holds (buffers that do not persist) is made equal in any case.
        send_from_first([*(model.parameters() if is_fresh else ()), *model.buffers()], self._group)
        precision = self._plan.compute.precision
        units, cut = cut_model(
            model,
            layout,
            sample=hints.sample,
            starts=hints.stages,
            precision=precision,
            device=device,
            group=self._group,
        )
        self._staged[model] = staged = StagedModel(
            model,
            units=units,
            cut=cut,
            layout=layout,
            group=self._axes.stages,
            link=link,
            device=device,
            precision=precision,
            note=self._note,
        )
        self._note(staged.headline)

    def _cut_gradients(self, models: Sequence[nn.Module]) -> Spread | None:
        if any(model in self._staged for model in models):
            from paceline.worker.stages import SharedGradients

            return SharedGradients([self._staged[model] for model in models])
        if not any(model in self._cuts for model in models):
            return None
        return CutGradients(
            group=self._axes.tensor,
            has_part=lambda parameter: id(parameter) in self._parts,
            is_partial=lambda parameter: id(parameter) in self._partial,
        )

    def _split(self, model: nn.Module, *, is_fresh: bool) -> None:
        """Split the rows of a model's state over the workers of this replica, as the layout says."""
        axes = self._axes
        if axes.mesh is None:
            return
        if is_fresh and axes.cutters is None:  # otherwise it was done before layers were cut
            send_from_first([*model.parameters(), *model.buffers()], self._group)
        before = dict(model.named_parameters(remove_duplicate=False))
        self._shards.add(
            ShardedModel(
                model,
                mesh=axes.mesh,
                zero=self._plan.layout.zero,
                precision=self._plan.compute.precision,
                on_host=self._plan.compute.offload == "all",
                ring=self._ring,
                group=axes.shard_name,
                traffic=self._shards.traffic,
            )
        )
        # They are others now. None of them is partial any more: what a forward sees is a third one, gathered, and to
        # layers that are cut that is like any whole tensor, whose gradient they sum themselves.
        for name, parameter in model.named_parameters(remove_duplicate=False):
            if id(before[name]) in self._parts:
                self._parts.add(id(parameter))
