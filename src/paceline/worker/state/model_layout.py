"""How the plan's layout is applied to a model, and which worker of a replica holds what of it afterwards.

A whole model comes in. Tensor, expert and context parallelism change its layers, pipeline parallelism keeps this
worker's stages, and ZeRO splits the rows of what is left. All of it is found out on the whole model, before anything
is changed.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from paceline.comm.sharded_tensors import TensorSlice, is_sharded
from paceline.errors import PlanError, SyncError
from paceline.parallel.apply import place, send_from_first
from paceline.parallel.check.model_hints import ModelHints
from paceline.parallel.check.model_support import require_fit, require_open
from paceline.parallel.coded_layers import keep_codes
from paceline.parallel.compiled import leave_out
from paceline.parallel.file_weights import without_same_files
from paceline.parallel.fully_sharded.sharded_model import ShardedModel
from paceline.parallel.generation_caches import is_of_transformers, turn_caches_off
from paceline.parallel.gradient_queries import refuse_gradients_at
from paceline.parallel.model_units import names_matching
from paceline.parallel.partial_state import PartialStateGuard, is_partial, reading_parts
from paceline.parallel.remote_embeddings import use_remote_tables
from paceline.sync.allreduce.gradient_sharding import GradientSharding, TensorParallelGradients
from paceline.worker.state.model_context import ModelContext
from paceline.worker.step.model_buffers import persistent_buffers
from paceline.worker.step.parameter_hooks import carry_hooks
from paceline.worker.topology.parallel_groups import StateOwner
from paceline.worker.topology.recorded_groups import RecordedContextGroup, RecordedExpertGroup, RecordedTensorGroup

if TYPE_CHECKING:
    from paceline.parallel.check.model_check import ModelCheck
    from paceline.parallel.context.plan import ContextPlan
    from paceline.parallel.expert.find_experts import RoutedExperts
    from paceline.parallel.pipeline.find_stages import PipelinePlan
    from paceline.parallel.pipeline.stage_transfer import StageTransport
    from paceline.parallel.tensor.plan import ParameterSplit, TensorPlan
    from paceline.parallel.tensor.split_tensor import TensorGroupOps
    from paceline.worker.step.pipeline_stages import PipelineModel

__all__ = ["ModelLayout"]


class ModelLayout:
    """Applies a plan's layout to the models of one worker, and knows which worker has which part of them."""

    def __init__(self, context: ModelContext) -> None:
        self._plan, self._group, self._axes = context.plan, context.group, context.axes
        self._shards, self._recorder, self._tables = context.shards, context.recorder, context.tables
        self._together, self._note = context.together, context.note
        self._splits: dict[nn.Module, Mapping[str, ParameterSplit]] = {}  # tensor parallel
        self._expert_splits: dict[nn.Module, Mapping[str, ParameterSplit]] = {}  # each worker has some experts
        self._experts: dict[nn.Module, Sequence[RoutedExperts]] = {}
        self._expert_owners: dict[nn.Module, Mapping[str, int]] = {}  # of parameters of experts in lists
        self._stages: dict[nn.Module, PipelineModel] = {}
        self.units: dict[nn.Module, tuple[str, ...]] = {}  # names of the modules that the user made units, by model
        # ids of parameters:
        self.split_ids: set[int] = set()  # those that are split
        self.partial_ids: set[int] = set()  # whole ones of whose gradients each worker has a part
        self._expert_ids: set[int] = set()  # those that belong to experts

    # What is applied.

    def place(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: ModelHints) -> None:
        """Convert, move, wrap and split a model as the plan says. `is_fresh`: no checkpoint will fill it.

        Raises PlanError with every problem that the model has with the plan, before anything is split.
        """
        keep_codes(model)
        try:
            self.units[model] = names_matching(model, hints.units)
            hints = dataclasses.replace(hints, units=self.units[model])
            require_fit(model, self._plan)
            require_open(model, self._plan)
        except PlanError:
            self._check(model, device=device, hints=hints)  # the problems with its layout are reported with this one
            raise
        is_trained = any(one.requires_grad for one in model.parameters())
        if (self._plan.compute.recompute != "none" or (is_trained and is_of_transformers(model))) and turn_caches_off(
            model
        ):
            self._note(
                f"{type(model).__name__}: config.use_cache is off from now on. Training needs no cache for generation: "
                "recomputed blocks would fill it twice, and beside it packed sequences are not kept apart"
            )
        before = dict(model.named_parameters(remove_duplicate=False))
        place(
            model,
            self._plan,
            device=device,
            units=hints.units,
            split_layers=lambda one: self._split_layers(one, device=device, is_fresh=is_fresh, hints=hints),
            shard=lambda one: self._shard(one, is_fresh=is_fresh, hints=hints),
            note=self._note,
        )
        carry_hooks(before, model)
        self._guard_gradients(model)
        if self._tables is not None:
            use_remote_tables(model, self._tables)

    def _split_layers(self, model: nn.Module, *, device: torch.device, is_fresh: bool, hints: ModelHints) -> None:
        """Split a whole model into stages, and its layers, over the workers of this replica, as the layout says.

        All is found out on the whole model; what is not of this worker's stages goes last.
        """
        axes = self._axes
        if not axes.is_split:
            return
        if self._changes_layers:  # what is found may depend on them; other buffers in any case: no checkpoint has them
            self._make_equal([*(model.parameters() if is_fresh else ()), *model.buffers()])
        found = self._check(model, device=device, hints=hints)
        before, ops = {id(parameter) for parameter in model.parameters()}, None
        if found.tensor is not None and axes.tensor_parallel_group is not None:
            ops = self._apply_tensor_parallel(model, found.tensor, axes.tensor_parallel_group)
        if found.experts is not None and axes.expert_parallel_group is not None:
            self._apply_expert_parallel(model, found.experts, axes.expert_parallel_group)
        if found.context is not None and axes.context_parallel_group is not None:  # around experts: they get tokens
            self._apply_context_parallel(model, found.context, axes.context_parallel_group, tensor_ops=ops)
        if found.stages is not None and axes.link is not None:
            self._apply_pipeline(model, found.stages, axes.link, device=device)
        left = before - {id(parameter) for parameter in model.parameters()}
        for known in (self.split_ids, self.partial_ids, self._expert_ids):
            known.difference_update(left)  # another parameter may get the number

    def _guard_gradients(self, model: nn.Module) -> None:
        """Refuse what asks autograd for gradients at parameters that get none there, or a part."""
        layout = self._plan.layout
        for name, parameter in model.named_parameters():
            if is_sharded(parameter):
                why = (
                    f"Layout(shard={layout.shard}) computes with a gathered copy of it, so there is no gradient here; "
                    "in a stepper's forward=, model.parameters() are these copies once the model was called"
                )
            elif self._axes.context.size > 1:
                why = f"under Layout(context={layout.context}) this worker has the part of its slice of each sequence"
            elif model in self._stages:
                why = (
                    f"Layout(stages={layout.stages}) computes its gradient after the loss, on the workers that have it"
                )
            elif self.is_of_experts(parameter):
                why = f"under Layout(experts={layout.experts}) it gets tokens of several workers' losses"
            elif id(parameter) in self.partial_ids:
                why = f"under Layout(tensor={layout.tensor}) this worker has a part of its gradient"
            else:
                continue
            refuse_gradients_at(parameter, name, why)

    @property
    def _changes_layers(self) -> bool:
        """Whether models are changed before their rows are split."""
        return self._axes.link is not None or bool(self._axes.users)

    def _check(self, model: nn.Module, *, device: torch.device, hints: ModelHints) -> ModelCheck:
        """Check a whole model; raises PlanError with every problem that it has with the layout.

        The first worker finds out the context parallel plan for all: that takes some copies of the model in double
        precision.
        """
        from paceline.parallel.check.model_check import check_model

        context_parallel_group, preparation_group = self._axes.context_parallel_group, self._axes.preparation_group
        found = check_model(
            model,
            self._plan,
            device=device,
            hints=hints,
            finds_context=preparation_group.index == 0,
        )
        error = found.error()
        if context_parallel_group is not None:
            error, context = preparation_group.broadcast_object((error, found.context))
            found = dataclasses.replace(found, context=context)
        if error is not None:
            raise error
        return found

    def _make_equal(self, tensors: Sequence[Tensor]) -> None:
        """Give all workers of the run the first one's; a newcomer is sent everything that counts later."""
        self._together(lambda: send_from_first(without_same_files(tensors, self._group), self._group))

    def _apply_tensor_parallel(
        self, model: nn.Module, plan: TensorPlan, tensor_parallel_group: RecordedTensorGroup
    ) -> TensorGroupOps:
        """Split the layers of a whole model over the tensor parallel group; returns the group as layers know it."""
        from paceline.parallel.tensor.apply import apply_plan, watch_places
        from paceline.parallel.tensor.split_gradients import watch_backward_hooks

        watch_backward_hooks()
        first = self._axes.preparation_group.broadcast_object(plan.layers)
        if first != plan.layers:
            raise SyncError(
                "the first worker splits other layers of the model than this worker, so they do not have the same "
                "model, or the same version of torch: make it equal on all workers before worker.prepare(model)"
            )
        applied = apply_plan(model, plan, tensor_parallel_group)
        layout = self._plan.layout
        if layout.shard * layout.stages * layout.experts == 1:  # others register parameters of their own
            watch_places(model, applied.parameters)
        self._splits[model] = applied.parameters
        names = dict(model.named_parameters(remove_duplicate=False))
        self.split_ids.update(id(names[name]) for name in applied.parameters)
        self.partial_ids.update(map(id, applied.summed))
        self._note(plan.headline)
        return applied.ops

    def _apply_context_parallel(
        self,
        model: nn.Module,
        plan: ContextPlan,
        context_parallel_group: RecordedContextGroup,
        *,
        tensor_ops: TensorGroupOps | None,
    ) -> None:
        """Have a model work on this worker's part of each sequence."""
        from paceline.parallel.context.apply import apply_plan
        from paceline.parallel.tensor.split_gradients import watch_backward_hooks

        watch_backward_hooks()
        apply_plan(model, plan, context_parallel_group, tensor_parallel_group=tensor_ops)
        self._note(str(plan).partition("\n")[0])

    def _apply_expert_parallel(
        self, model: nn.Module, found: Sequence[RoutedExperts], expert_parallel_group: RecordedExpertGroup
    ) -> None:
        """Keep this worker's experts of a whole model."""
        from paceline.parallel.expert.apply import distribute_experts

        applied = distribute_experts(model, found, expert_parallel_group)
        self._expert_splits[model], self._expert_owners[model] = applied.splits, applied.owners
        self._experts[model] = found
        for one in found if self._plan.compute.compile else ():  # the compiled block calls it as written
            leave_out(one.module)
        self._expert_ids.update(id(p) for name, p in model.named_parameters() if applied.is_of_experts(name))
        self._note(applied.headline)

    def _apply_pipeline(
        self, model: nn.Module, found: PipelinePlan, link: StageTransport, *, device: torch.device
    ) -> None:
        """Keep this worker's stages of a model."""
        from paceline.worker.step.pipeline_stages import PipelineModel

        if self._axes.preparation_group.broadcast_object(found.partition) != found.partition:
            raise SyncError(
                "the first worker partitions the model into other stages than this worker, so they do not have the "
                "same model, or the same version of torch: make it equal on all workers before worker.prepare(model)"
            )
        self._stages[model] = stages = PipelineModel(
            model,
            units=found.units,
            partition=found.partition,
            layout=self._plan.layout,
            group=self._axes.stages,
            link=link,
            device=device,
            precision=self._plan.compute.precision,
            note=self._note,
            still=self._still,
            shards=self._shards,
        )
        self._note(stages.headline)

    @contextlib.contextmanager
    def _still(self) -> Iterator[None]:
        """While it lasts, forwards send nothing between workers."""
        with contextlib.ExitStack() as stack:
            for one in (*self._axes.users, self._shards):
                stack.enter_context(one.still())
            yield

    def _shard(self, model: nn.Module, *, is_fresh: bool, hints: ModelHints) -> None:
        """Split the rows of a model's state over the workers of this replica (ZeRO), as the layout says."""
        axes = self._axes
        if axes.rows is None:
            return
        if is_fresh and not self._changes_layers:  # otherwise it was done before
            self._make_equal([*model.parameters(), *model.buffers()])
        before = dict(model.named_parameters(remove_duplicate=False))
        self._shards.add(
            ShardedModel(
                model,
                rows=axes.rows,
                experts=self._experts_here(model),
                expert_rows=axes.expert_rows,
                units=hints.units,
                apart=self._stages[model].own_units() if model in self._stages else None,
                is_late=self._plan.layout.schedule == "zero-bubble",
                zero=self._plan.layout.zero,
                precision=self._plan.compute.precision,
                on_host=self._plan.compute.offload == "all",
                recorder=self._recorder,
                traffic=self._shards.traffic,
            )
        )
        # They are others now. None of them is partial any more: what a forward sees is a third one, gathered, and to
        # tensor parallel layers that is like any whole tensor, whose gradient they sum themselves.
        after = model.named_parameters(remove_duplicate=False)
        changed = [(id(before[name]), id(parameter)) for name, parameter in after]
        for known in (self.split_ids, self._expert_ids):
            now = {new for old, new in changed if old in known}
            known.difference_update(old for old, _ in changed)
            known.update(now)
        # Another parameter may get the number.
        self.partial_ids.difference_update(old for old, new in changed if old != new)

    def _experts_here(self, model: nn.Module) -> list[tuple[str, nn.Module]]:
        """The modules of experts of which this worker has some, with their names."""
        found = [(one.name, one.module) for one in self._experts.get(model, ())]
        return [pair for pair in found if any(not parameter.is_meta for parameter in pair[1].parameters())]

    # Which worker has what of it.

    def routed(self, model: nn.Module) -> tuple[str, ...]:
        """The names of a model's modules of whose experts each worker has some."""
        return tuple(one.name for one in self._experts.get(model, ()))

    def guard_state(self, model: nn.Module) -> None:
        """Refuse `state_dict()` of a model of which this worker has only a part, and let it load whole weights."""
        slices, owners = self.slices(model), self.owners(model)
        if is_partial(model, slices, owners):
            PartialStateGuard(
                model,
                layout=self._plan.layout,
                slices=slices,
                has_owners=bool(owners),
                close=self._shards.close,
            )

    def splits(self, model: nn.Module) -> Iterator[tuple[Mapping[str, ParameterSplit], RecordedTensorGroup]]:
        """Yield how parameters of a model are split, by name, and the group whose workers hold the parts."""
        if self._axes.tensor_parallel_group is not None:
            yield self._splits.get(model, {}), self._axes.tensor_parallel_group
        if self._axes.expert_parallel_group is not None:
            yield self._expert_splits.get(model, {}), self._axes.expert_parallel_group

    def slices(self, model: nn.Module) -> dict[str, TensorSlice]:
        """What is here of the parameters of a model that are split, by every name that they have in it."""
        return {
            key: TensorSlice(split.shape, split.dim, split.ranges(holders.index))
            for splits, holders in self.splits(model)
            for key, split in splits.items()
        }

    def owners(self, model: nn.Module) -> Mapping[str, StateOwner]:
        """Which worker of a replica stores what of a model's state, where workers have different tensors of it: with
        pipeline or expert parallelism."""
        if self._axes.parted.size == 1:
            return {}
        if model in self._stages:
            stages = self._stages[model].homes()
        else:
            buffers = (name for name, _, _ in persistent_buffers(model))  # also those that are None as yet
            with reading_parts():
                stages = dict.fromkeys([*model.state_dict(), *buffers], 0)
        owners, everybodys = self._expert_owners.get(model, {}), set(self._expert_splits.get(model, {}))
        if self._axes.shard_group.size > 1:  # the rows of all else are over those that have other experts, too
            named = model.named_parameters(remove_duplicate=False)
            everybodys |= {name for name, one in named if is_sharded(one) and name not in owners}
        splits = self._splits.get(model, {})
        return {
            name: StateOwner(
                stage=stage,
                expert=None if name in everybodys else owners.get(name, 0),
                tensor=None if name in splits else 0,
            )
            for name, stage in stages.items()
        }

    def stages(self, model: nn.Module) -> PipelineModel | None:
        """The stages of a model that are here; None without pipeline parallelism."""
        return self._stages.get(model)

    def is_of_experts(self, parameter: nn.Parameter) -> bool:
        """Whether a parameter belongs to experts that are spread over the workers of a replica."""
        return id(parameter) in self._expert_ids

    def shardings(self, models: Sequence[nn.Module]) -> list[GradientSharding]:
        """How the gradients of these models are spread over workers of the replica, axis by axis."""
        found: list[GradientSharding] = []
        if self._axes.link is not None and self._axes.shard_group.size > 1:
            # The rows of a stage's units; what is between units is whole, and has a part of its gradient everywhere.
            found.append(
                TensorParallelGradients(
                    group=self._axes.shard_group, has_part=is_sharded, is_partial=lambda p: not is_sharded(p)
                )
            )
        elif any(model in self._experts for model in models) and self._axes.shard_group.size == 1:
            # With experts alone all other gradients are summed over all workers of the run at once.
            is_summed = not self._axes.is_expert_parallel_only
            found.append(
                TensorParallelGradients(
                    group=self._axes.experts,
                    has_part=self.is_of_experts,
                    is_partial=lambda parameter: is_summed and not self.is_of_experts(parameter),
                )
            )
        if self._axes.context.size > 1 and not self._axes.spans_context:
            found.append(
                TensorParallelGradients(group=self._axes.context, has_part=lambda _: False, is_partial=lambda _: True)
            )
        if any(model in self._splits for model in models):
            found.append(
                TensorParallelGradients(
                    group=self._axes.tensor,
                    has_part=lambda parameter: id(parameter) in self.split_ids,
                    is_partial=lambda parameter: id(parameter) in self.partial_ids,
                )
            )
        if any(model in self._stages for model in models):
            from paceline.worker.step.tied_gradients import TiedStageGradients

            found.append(TiedStageGradients([self._stages[model] for model in models if model in self._stages]))
        return found
